"""Python runs this first in every process that has this folder on its path: in the ranks that tests start too."""

import os
import sys
import traceback

if os.environ.get("UPSTREAM_HOW"):
    try:
        import upstream_kit
        import upstream_worlds

        upstream_kit.install()
        upstream_worlds.install(os.environ["UPSTREAM_HOW"])
    except Exception:  # Python itself would print it and go on without
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)
