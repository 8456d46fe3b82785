"""What all tests share: hypothesis without deadlines, since the machine may be busy with other test processes.

Where CI is set the examples are the same in every run, so that a change is judged by what it does and not by luck;
elsewhere each run draws new ones.
"""

import os

from hypothesis import settings

settings.register_profile("viviane", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True)
settings.load_profile("viviane")
