import os

from hypothesis import settings

settings.register_profile("default", deadline=None)  # machines are shared, and torch is slow the first time
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
