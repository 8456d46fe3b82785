"""Programs are run by the tests, not collected as tests: outside the door there is no `hugectr`."""

collect_ignore_glob = ["programs/*"]
