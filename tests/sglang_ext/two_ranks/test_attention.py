"""SGLang's attention backends read the working-set table in the place of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.two_ranks.attention import _RunnerOverTable


def test_backends_that_ask_a_translator_read_the_table_they_are_built_over() -> None:
    translators = pytest.importorskip("sglang.srt.mem_cache.kv_index_translator", reason="0.5.23")
    true, table = torch.zeros(2, 4, 10, dtype=torch.int32)
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=true, size=4))
    runner.kv_index_translator = translators.KVIndexTranslator(
        req_to_token=true,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=1,
        device="cpu",
    )
    rows = {"req_pool_indices": torch.tensor([1]), "bs": 1}
    seen = _RunnerOverTable(runner, table).kv_index_translator.read_source(None, **rows)
    assert (seen.ids is table, seen.v2p) == (True, None)
    assert runner.kv_index_translator.read_source(None, **rows).ids is true
