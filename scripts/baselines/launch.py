"""Serve with a baseline in place of a cache rank.

python -m scripts.baselines.launch --decode-mode quest --sparse-budget 2048 [any SGLang flag]
"""

from __future__ import annotations

import sys

from scripts.baselines import plugin
from scripts.baselines.args import BaselineServerArgs
from sglang_ext.launch import main

if __name__ == "__main__":
    plugin.register()
    sys.exit(main(sys.argv[1:], BaselineServerArgs, plugin.run_scheduler_process))
