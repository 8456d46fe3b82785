"""What all tests share: hypothesis without deadlines, since the machine may be busy with other test processes."""

from hypothesis import settings

settings.register_profile("viviane", deadline=None)
settings.load_profile("viviane")
