"""Write the tables of figures in README.md and docs/ from benchmarks/results/: python benchmarks/tables.py [--check]

A page asks for a table with a pair of markers; what stands between them is replaced:

    <!-- figures: train quality -->
    <!-- figures end -->

names the benchmarks; `all` gives every one, with a heading each; `headlines` gives one table of the figures that
headlines.json names, with the command of each.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(
    r"(?P<begin><!-- figures: (?P<names>[\w ]+) -->\n)(?P<old>.*?)(?P<end><!-- figures end -->)", re.DOTALL
)
NONE_YET = "No figures recorded yet; `make bench` records them.\n"

Figure = dict[str, Any]


def load(results: Path) -> dict[str, list[Figure]]:
    """Return the newest line of each figure by benchmark, in the order in which the figures first appeared."""
    benches: dict[str, list[Figure]] = {}
    for path in sorted(results.glob("*.jsonl")):
        newest: dict[str, Figure] = {}
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                figure = json.loads(line)
                key = json.dumps([figure["case"], figure["metric"], figure.get("shape"), figure["machine"]])
            except (json.JSONDecodeError, KeyError) as error:
                raise SystemExit(f"{path}:{number}: not a figure ({error!r})") from error
            newest[key] = figure
        if newest:
            benches[path.stem] = list(newest.values())
    return benches


def number(value: float | None) -> str:
    """Write a figure with four significant digits, without an exponent."""
    if value is None:
        return ""
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.3g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def shape_of(figure: Figure) -> dict[str, Any]:
    """Return the shape of a figure; old lines have a list or none."""
    shape = figure.get("shape")
    return shape if isinstance(shape, dict) else {} if shape is None else {"shape": shape}


def cases(figures: list[Figure]) -> list[str]:
    """Return the case of each figure, with the parts of its shape in which figures of one name differ.

    Example:
        >>> common = {"case": "lookup", "metric": "time"}
        >>> cases([{**common, "shape": {"batch": 1, "dim": 8}}, {**common, "shape": {"batch": 64, "dim": 8}}])
        ['lookup (batch 1)', 'lookup (batch 64)']
    """
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for figure in figures:
        alike.setdefault((figure["case"], figure["metric"]), []).append(shape_of(figure))
    named = []
    for figure in figures:
        shapes, own = alike[figure["case"], figure["metric"]], shape_of(figure)
        differ = [part for part in own if any(other.get(part) != own[part] for other in shapes)]
        text = ", ".join(f"{part.replace('_', ' ')} {_plain(own[part])}" for part in differ)
        named.append(f"{figure['case']} ({text})" if text else figure["case"])
    return named


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def row(figure: Figure) -> list[str]:
    value = f"**{number(figure['value'])}** {figure['unit']}"
    if figure.get("spread"):
        low, high = figure["spread"]
        value += f" ({number(low)} to {number(high)})"
    goal = figure.get("goal")
    if goal is not None:
        met = figure["value"] >= goal if figure["better"] == "higher" else figure["value"] <= goal
        goal_text = f"{number(goal)} ({'met' if met else 'not met'})"
    else:
        goal_text = ""
    peer = f"{figure['peer']}: {number(figure.get('peer_value'))}" if figure.get("peer") else ""
    better = "more" if figure["better"] == "higher" else "less"
    return [
        figure["case"],
        f"{figure['metric']}, {better} is better",
        value,
        goal_text,
        number(figure.get("floor")),
        peer,
        figure.get("peer_published") or "",
    ]


def table(figures: list[Figure]) -> str:
    """Return one benchmark's figures as Markdown, a table for each machine, empty columns left out."""
    headings = ["case", "figure", "value", "goal", "limit", "peer, same run", "peer, another run"]
    parts = []
    for machine in dict.fromkeys(figure["machine"] for figure in figures):
        here = [figure for figure in figures if figure["machine"] == machine]
        rows = [[case, *row(figure)[1:]] for case, figure in zip(cases(here), here, strict=True)]
        kept = [i for i in range(len(headings)) if any(line[i] for line in rows)]
        lines = [[headings[i] for i in kept], ["---" for _ in kept], *([line[i] for i in kept] for line in rows)]
        text = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
        dates = sorted({figure["date"] for figure in here})
        torch = sorted({str(figure["versions"].get("torch")) for figure in here})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        parts.append(f"{text}\n*{machine}; torch {', '.join(torch)}; {when}.*\n")
    return "\n".join(parts)


def headlines(benches: dict[str, list[Figure]]) -> str:
    """Return the figures that headlines.json names, one table whatever the machine."""
    headings = ["what", "Viviane", "goal", "peer, same run", "peer, another run", "where, and the command"]
    lines = [headings, ["---"] * len(headings)]
    for one in json.loads((Path(__file__).parent / "headlines.json").read_text(encoding="utf-8")):
        figure = _only(one, benches)
        _, _, value, goal, _, peer, published = row(figure)
        name = one["bench"]
        command = "make quality" if name == "quality" else f"make bench, {name}.py"
        machine = figure["machine"]
        if "NVIDIA" in machine:
            machine, command = machine.rsplit(", ", 1)[1], f"make gpu, {name}.py"
        lines.append([one["what"], value, goal, peer, published, f"{machine}; {command}"])
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _only(one: dict[str, Any], benches: dict[str, list[Figure]]) -> Figure:
    """Return the one newest figure that a headline names."""
    wanted = one.get("shape", {}).items()
    found = [
        figure
        for figure in benches.get(one["bench"], [])
        if (figure["case"], figure["metric"]) == (one["case"], one["metric"])
        and wanted <= (figure["shape"] if isinstance(figure["shape"], dict) else {}).items()
    ]
    shapes = {json.dumps(shape_of(figure), sort_keys=True) for figure in found}
    if len(shapes) != 1:
        raise SystemExit(f"headlines.json: {one['what']!r} names {len(shapes)} figures of {one['bench']}, not one")
    return max(found, key=lambda figure: figure["date"])  # of several machines, the one measured last


def render(names: str, benches: dict[str, list[Figure]]) -> str:
    if names.strip() == "headlines":
        return headlines(benches)
    wanted = list(benches) if names.strip() == "all" else names.split()
    found = [name for name in wanted if name in benches]
    if not found:
        return NONE_YET
    if len(wanted) == 1 and names.strip() != "all":
        return table(benches[found[0]])
    return "\n".join(f"### {name}\n\n{table(benches[name])}" for name in found)


def rewrite(text: str, benches: dict[str, list[Figure]]) -> str:
    return MARKED.sub(lambda match: match["begin"] + render(match["names"], benches) + match["end"], text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of figures from benchmarks/results/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    benches = load(arguments.root / "benchmarks" / "results")
    stale = []
    for page in [arguments.root / "README.md", *sorted((arguments.root / "docs").rglob("*.md"))]:
        old = page.read_text(encoding="utf-8")
        new = rewrite(old, benches)
        if new != old:
            stale.append(str(page.relative_to(arguments.root)))
            if not arguments.check:
                page.write_text(new, encoding="utf-8")
    if arguments.check and stale:
        print(f"not up to date: {', '.join(stale)}; run `make bench-tables`", file=sys.stderr)
        return 1
    if not arguments.check:
        print(f"rewritten: {', '.join(stale) or 'nothing, all pages are up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
