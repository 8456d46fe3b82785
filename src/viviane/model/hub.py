"""Models on the Hugging Face Hub: a saved model's folder with a model card."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from viviane.core.errors import ConfigError, RemoteError, VivianeError
from viviane.core.optional import require
from viviane.core.remote.retry import retried

CARD: Final = "README.md"
_MOST_COLUMNS: Final = 100


def model_card(model: Any, *, title: str | None = None, license: str | None = None, text: str = "",  # noqa: A002
               figures: dict[str, float] | None = None) -> str:  # fmt: skip
    """Return a model card: front matter, how to use the model, its columns, layers and figures.

    Args:
        model: a compiled `viviane.Model`.
        title: None takes the model's name.
        license: identifier of the Hub, such as "apache-2.0".
        text: what the model is for, what it was trained on and where it fails, in Markdown.
        figures: of held-out rows, such as `model.evaluate(data)`.

    Example:
        >>> from viviane import Schema, Solver
        >>> from viviane.model import Model
        >>> from viviane.zoo import DeepFM
        >>> schema = Schema(labels=[{"name": "y"}], categorical=[{"name": "c", "num_ids": 9}])
        >>> model = Model(Solver(device="cpu"), schema, name="clicks")
        >>> model.add(DeepFM(dim=2))
        >>> model.compile()
        >>> model_card(model, figures={"auc": 0.71}).splitlines()[:3]
        ['---', 'library_name: viviane', 'tags:']
    """
    summary = model.describe()
    front = [
        "---",
        "library_name: viviane",
        "tags:",
        "- recommender",
        "- click-through-rate",
        "- tabular-classification",
    ]
    front += [f"license: {license}"] if license else []
    schema = model.schema
    rows = [f"| `{one.name}` | dense | {one.dim} |" for one in schema.dense]
    rows += [f"| `{one.name}` | {one.kind} | {one.num_ids or 'raw ids'} |" for one in schema.categorical]
    more = [f"| ... {len(rows) - _MOST_COLUMNS} more | | |"] if len(rows) > _MOST_COLUMNS else []
    labels = ", ".join(f"`{one.name}`" for one in schema.labels)
    use = [
        "```python",
        "import viviane as vv",
        "",
        'model = vv.Model.from_hub("OWNER/NAME")',
        "p = model.predict(rows)",
        "```",
    ]
    scores = [f"| {name} | {value:.5f} |" for name, value in (figures or {}).items()]
    parts = [
        "\n".join([*front, "---", "", f"# {title or model.name}"]),
        text,
        f"Predicts {labels} with {summary.dense_parameters:,} dense weights and {summary.table_parameters:,} in tables."
        + (" It takes raw rows: the fitted ETL is inside." if model.etl is not None else " It takes encoded rows."),
        "\n".join(use),
        "\n".join(["| held-out | |", "|---|---|", *scores]) if scores else "",
        "\n".join(["| column | kind | size |", "|---|---|---|", *rows[:_MOST_COLUMNS], *more]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def push(model: Any, repo_id: str, *, private: bool | None, token: str | None, endpoint: str | None, card: str,
         message: str) -> str:  # fmt: skip
    """Write the model's folder and its card to a repository of the Hub; returns its address.

    Raises:
        RemoteError: the Hub does not answer or refuses.
    """
    hub = _library()
    with tempfile.TemporaryDirectory(prefix="viviane-hub-") as folder:
        model.save(Path(folder) / "model")
        (Path(folder) / "model" / CARD).write_text(card.replace("OWNER/NAME", repo_id), encoding="utf-8")
        try:
            api = hub.HfApi(endpoint=endpoint, token=token)
            where = _tried(lambda: api.create_repo(repo_id, private=private, exist_ok=True), repo_id, "creating")
            _tried(
                lambda: api.upload_folder(
                    repo_id=repo_id, folder_path=Path(folder) / "model", commit_message=message
                ),
                repo_id, "writing",
            )  # fmt: skip
        except Exception as error:  # the library raises all kinds for names and answers that it does not expect
            if isinstance(error, VivianeError):
                raise
            fix = "check name, endpoint and token: `hf auth login`"
            raise RemoteError("the Hub refuses the model", where=repo_id, value=_line(error), fix=fix) from error
    return str(where)


def pull(repo_id: str, *, revision: str | None, token: str | None, endpoint: str | None) -> Path:
    """Download a repository of the Hub into a new temporary folder, which the caller removes.

    The Hub's own cache is not used: its files are symbolic links, which a saved model may not hold.

    Raises:
        RemoteError: the Hub does not answer, or there is no such repository or revision.
        ConfigError: the repository holds no model of Viviane.
    """
    hub = _library()
    folder = Path(tempfile.mkdtemp(prefix="viviane-hub-"))
    try:
        _tried(
            lambda: hub.snapshot_download(
                repo_id, revision=revision, token=token, endpoint=endpoint, local_dir=folder
            ),
            repo_id, "reading",
        )  # fmt: skip
        if not (folder / "files.json").exists():
            fix = "push one: model.push_to_hub"
            raise ConfigError("the repository holds no model of Viviane", where=repo_id, fix=fix)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, VivianeError):
            raise
        fix = "check name, revision, endpoint and token: `hf auth login`"
        raise RemoteError("the Hub does not give the model", where=repo_id, value=_line(error), fix=fix) from error
    return folder


def _library() -> Any:
    return require("huggingface_hub", extra="hub", purpose="the Hugging Face Hub")


def _tried(request: Callable[[], Any], repo_id: str, purpose: str) -> Any:
    """Return the result of a request, tried again while the Hub does not answer; what it refuses is raised at once."""
    refusal: list[Exception] = []

    def once() -> Any:
        try:
            return request()
        except Exception as error:
            if _is_transient(error):
                raise ConnectionError(_line(error)) from None
            refusal.append(error)
            raise RemoteError("the Hub refuses", where=repo_id) from error

    try:
        return retried(once, f"the Hub's {repo_id}", purpose)
    except RemoteError:
        if refusal:
            raise refusal[0] from None
        raise


def _is_transient(error: Exception) -> bool:
    """Whether a second try may succeed: no answer, too many requests, a failure of the server."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status in (408, 429) or status >= 500
    unanswered = ("ConnectError", "ReadError", "WriteError", "RemoteProtocolError", "LocalEntryNotFoundError")
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(names & {*unanswered, "TimeoutException"})


def _line(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0]
    return ascii(f"{type(error).__name__}: {said}"[:500])[1:-1]
