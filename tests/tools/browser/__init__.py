# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks in a real browser; not collected by default, since they need Chromium (`make test-browser`)."""
