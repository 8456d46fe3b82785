"""A hook of MkDocs: the edit link of each page, where VIVIANE_REPOSITORY names the repository, and none elsewhere."""

from typing import Any


def on_config(config: Any) -> Any:
    """Turn the default of the repository's host, which names the branch `master`, into our branch."""
    if not config.repo_url:
        config.edit_uri = None
    elif config.edit_uri:
        config.edit_uri = config.edit_uri.replace("/master/", "/main/")
    return config
