"""SGLang's server arguments with a cache rank: read, checked, and completed by what it needs."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from sglang.srt.server_args import (
    ATTENTION_BACKEND_CHOICES,
    ServerArgs,
    add_attention_backend_choices,
    add_disagg_transfer_backend_choices,
)
from sglang.srt.utils import is_flashinfer_available

from sglang_ext import compat, cpu
from sglang_ext.flag_parser import add_flags
from sglang_ext.flags import (
    BACKEND,
    CACHE_RANK_FIELDS,
    DRAFT_TOKENS,
    HEEDED_FIELDS,
    PREFILL_BACKEND,
    TRANSFER_FIELDS,
    TRANSFERS,
    CacheRankFlags,
    flag_of,
)
from sglang_ext.ineffective_flags import warn_ineffective_flags
from sglang_ext.model_path import require_model
from sglang_ext.prediction import choose_schedule, rotary_type
from sglang_ext.refusals import refuse, refuse_untested_sglang, servers
from sglang_ext.refusals.known import say_unknown

logger = logging.getLogger(__name__)

BUNDLED_MODEL = Path(__file__).parent / "bundled_model"
"""The model that is served when no other is named."""

_CPU_POOL_TOKENS = 1 << 17
"""The KV pool on a CPU has this many tokens, unless the user names a number."""

_CPU_RUNNING_REQUESTS = 64
"""A server on a CPU runs this many requests at once, unless the user names a number."""


class CacheRankServerArgs(CacheRankFlags):
    """SGLang's ServerArgs with the flags of the cache rank.

    Raises:
        UnsupportedError: an argument cannot be combined with a cache rank; the message has the
            remedy.
        FileNotFoundError: there is no such model.
    """

    def __post_init__(self) -> None:
        if compat.RESOLVED_IN == "__post_init__":
            self._resolve(super().__post_init__)

    def resolve_once(self) -> None:
        if not compat.is_resolved(self):
            self._resolve(super().resolve_once)

    def _resolve(self, let_sglang: Callable[[], None]) -> None:
        """Check what is given, and choose what is not, before SGLang does and after."""
        refuse_untested_sglang(self)
        if self.transfers_codes:
            self._set_for_transfers()
        if not self.is_sparse:
            self._say_ignored("without a cache rank these have no effect")
            if self.transfers_codes and not self.on_gpu:
                self._set_for_cpu()  # as of the other server, which may select
            let_sglang()
            if self.transfers_codes:
                self._refuse_model_of_transfers()
            return
        self._refuse_arguments()
        say_unknown(self)
        if self.is_inline:
            self._say_ignored("cache rank: only a cache rank with --cache-rank-gpus 1 heeds these")
            self._set("prefill_attention_backend", PREFILL_BACKEND, "prefill writes sketches")
        else:
            self._set_for_working_sets()
        self._set_for_device()
        self._set("decode_attention_backend", BACKEND, "sparse decode")
        if self.has_drafts:
            self._set_for_drafts()
        try:
            let_sglang()
        except AssertionError:  # some models ask something of a machine
            self._refuse_model()
            raise
        if self.has_cache_rank:
            self._choose_schedule()
            self._follow_budget()
        self._refuse_model()
        self._say_how_it_selects()
        warn_ineffective_flags(self, compat.model_config(self).context_len)

    def _say_how_it_selects(self) -> None:
        if self.is_inline:
            logger.info(
                "cache rank: tokens are selected in this process (without --cache-rank-gpus, which "
                "names a GPU for it or switches it off), --sparse-budget %s",
                self.budget_curve,
            )
        else:
            options = f" ({self.kv_residency_options})" if self.kv_residency_options else ""
            said = self.budget_curve, self.kv_residency, options
            logger.info("cache rank: --sparse-budget %s, --kv-residency %s%s", *said)

    def _refuse_arguments(self) -> None:
        """Refuse what the user explicitly asked for and cannot have."""
        refuse(self, servers.sparse_decode(self))
        refuse(self, servers.inline(self) if self.is_inline else servers.exchange(self))
        servers.refuse_out_of_range(self)
        require_model(self.model_path, self.revision)

    def _refuse_model(self) -> None:
        """Refuse a model that cannot decode sparsely, or not in this placement."""
        # Imported here: it brings SGLang's layers, for which a refused flag need not wait.
        from sglang_ext.refusals import models

        refuse(self, models.sparse_decode(self))
        refuse(self, models.inline(self) if self.is_inline else models.exchange(self))
        refuse(self, models.calibration(self))

    def _refuse_model_of_transfers(self) -> None:
        from sglang_ext.refusals import models

        refuse(self, models.transfers(self))

    def _choose_schedule(self) -> None:
        """Choose how queries are predicted, and the layers of a group, where the user does not."""
        model = compat.model_config(self)
        predictor, group_layers, why = choose_schedule(
            self.query_predictor,
            self.layers_per_group,
            self.forecast_lead,
            architecture=str(model.hf_config.architectures[0]),
            rotary_type=rotary_type(model.hf_text_config.to_dict()),
            sparse_layers=model.num_hidden_layers - self.dense_layers,
        )
        if self.query_predictor is None:
            logger.info("cache rank: --query-predictor %s (%s)", predictor, why)
        compat.decide(self, query_predictor=predictor, layers_per_group=group_layers)

    def _follow_budget(self) -> None:
        """Set what follows --sparse-budget where the user does not."""
        config = self.cache_rank_config(servers.ANY_SHAPE, max_rows=1)
        compat.decide(
            self,
            hysteresis=config.hysteresis,
            max_swap_tokens=config.max_swap_tokens,
        )

    def _set_for_working_sets(self) -> None:
        if self.inference_kv == "working-set":
            why = "--inference-kv working-set frees the rows that could be reused; full keeps them"
            self._set("disable_radix_cache", True, why)
        self._set("page_size", 1, "tokens are selected one by one")

    def _set_for_transfers(self) -> None:
        refuse(self, servers.transfers(self))
        self._set_missing("page_size", 1, "rows of tokens travel")
        if not self.on_gpu:
            # It records an event of a GPU.
            os.environ.setdefault("SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX", "0")
        if compat.POOLS_RETRACTED and (self.has_cache_rank or not self.on_gpu):
            why = "a pool for them needs a GPU, and a cache rank is not told when it is filled"
            self._set("disaggregation_decode_retraction_backup", "cpu_tensor", why)

    def _set_for_drafts(self) -> None:
        # Imported here: a refused flag need not wait for it.
        from sglang_ext.drafts import algorithm

        algorithm.register()  # SGLang looks for it before plugins are loaded
        self._set_missing("speculative_num_draft_tokens", DRAFT_TOKENS, "drafts and one token")
        drafts = int(self.speculative_num_draft_tokens) - 1
        self._set("speculative_num_steps", drafts, "a chain of drafts")
        self._set("speculative_eagle_topk", 1, "a chain of drafts")
        self._set("sampling_backend", "pytorch", "drafts and verification draw with one noise")
        if not self.on_gpu:
            self._set("disable_overlap_schedule", True, "as SGLang has it on CPUs with drafts")

    def _set_for_device(self) -> None:
        if not self.on_gpu:
            self._set_for_cpu()
            return
        self.device = "cuda"
        kernels = _kernels_of_this_gpu(runs_ahead=self.has_drafts)
        self._set_missing("attention_backend", kernels, "kernels of this GPU")

    def _set_for_cpu(self) -> None:
        if not cpu.has_gpu():
            logger.warning(
                "no GPU found: this is served by CPU processes, and sgl_kernel is a stand-in that "
                "cannot compute"
            )
        self._set("device", "cpu", "no GPU found")
        self._set_missing("attention_backend", "torch_native", "the CPU engine's backend")
        self._set_missing("sampling_backend", "pytorch", "the CPU engine's sampler")
        if not compat.HAS_GRAMMARS_ON_CPUS:
            why = "requests cannot have grammars: before SGLang 0.5.23 their masks need a GPU"
            self._set_missing("grammar_backend", "none", why)
        self._set("sleep_on_idle", True, "an idle scheduler would take a core from the others")
        self._set_missing("max_total_tokens", _CPU_POOL_TOKENS, "host memory is shared")
        self._set_missing("max_running_requests", _CPU_RUNNING_REQUESTS, "host memory is shared")
        if self.dtype == "auto" and _config_dtype(self.model_path) == "float32":
            self._set("dtype", "float32", "the checkpoint's own")

    def _set_missing(self, field: str, value: Any, reason: str) -> None:
        if getattr(self, field) is None:
            self._set(field, value, reason)

    def _set(self, field: str, value: Any, reason: str) -> None:
        if getattr(self, field) != value:
            setattr(self, field, value)
            logger.info("cache rank: %s %s (%s)", flag_of(field), value, reason)

    def _say_ignored(self, why: str) -> None:
        """Log which of our flags are not at their defaults and have no effect."""
        defaults, heeded = compat.default_values(type(self)), HEEDED_FIELDS[self.placement]
        heeded = heeded | TRANSFER_FIELDS if self.transfers_codes else heeded
        ignored = [
            flag_of(field)
            for field in CACHE_RANK_FIELDS
            if field not in heeded and getattr(self, field) != defaults[field]
        ]
        if ignored:
            logger.warning("%s: %s", why, ", ".join(ignored))


def parse_server_args(
    argv: Sequence[str], kind: type[CacheRankServerArgs] = CacheRankServerArgs
) -> CacheRankServerArgs:
    """Parse a command line as SGLang's launcher does.

    Without a model path, the bundled model is served.

    Args:
        kind: of the arguments; a class that is derived from ours may have more flags.

    Raises:
        UnsupportedError: an argument cannot be combined with a cache rank.
        FileNotFoundError: there is no such model.
    """
    parser = argument_parser(kind)
    arguments = list(argv)
    if "--config" in arguments:
        arguments = compat.merge_config_file(parser, arguments)
    # The last occurrence of a flag wins, however the user spells it.
    parsed = parser.parse_args(["--model-path", str(BUNDLED_MODEL), *arguments])
    logging.basicConfig(
        level=parsed.log_level.upper(),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    args: CacheRankServerArgs = kind.from_cli_args(parsed)
    compat.resolve(args)
    return args


class _Help(argparse.Action):
    """Prints our flags, and with --help-all SGLang's hundreds behind them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> NoReturn:
        is_short = option != "--help-all"
        ours = _parser_of_ours(self.const, None if is_short else "SGLang's own options follow.")
        ours.print_help()
        if not is_short:
            theirs = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
            ServerArgs.add_cli_args(theirs)
            theirs.print_help()
        parser.exit()


def _parser_of_ours(
    kind: type[CacheRankServerArgs], epilog: str | None = None
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_ext.launch",
        usage="%(prog)s [--model-path MODEL] [options below] [options of sglang.launch_server]",
        add_help=False,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,  # for the lines of the keys
    )
    add_flags(parser, kind)
    helps = {"-h --help": "print this", "--help-all": "print SGLang's options as well"}
    for flags, text in helps.items():
        parser.add_argument(*flags.split(), action=_Help, nargs=0, const=kind, help=text)
    return parser


def argument_parser(
    kind: type[CacheRankServerArgs] = CacheRankServerArgs,
) -> argparse.ArgumentParser:
    """Make a parser of SGLang's flags, with ours under a heading of their own."""
    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND, PREFILL_BACKEND])
        add_disagg_transfer_backend_choices([TRANSFERS])
    parser = _parser_of_ours(kind)
    ServerArgs.add_cli_args(parser)
    return parser


def _kernels_of_this_gpu(runs_ahead: bool) -> str:
    """Choose as SGLang does, but for trtllm_mha, its choice for B200: pages of it are larger.

    Args:
        runs_ahead: whether the host queues several steps, for which FlashInfer has no plan.
    """
    if torch.cuda.get_device_capability()[0] == 9:
        return "fa3"
    return "flashinfer" if is_flashinfer_available() and not runs_ahead else "triton"


def _config_dtype(model_path: str) -> str | None:
    """The dtype that a local model's config.json names, if it does."""
    config = Path(model_path) / "config.json"
    if not config.is_file():
        return None
    values = json.loads(config.read_text())
    return values.get("dtype") or values.get("torch_dtype")
