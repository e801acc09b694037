"""``python -m mla_prefill`` is the ``mla-prefill`` command."""

import sys

from mla_prefill.cli import main

sys.exit(main())
