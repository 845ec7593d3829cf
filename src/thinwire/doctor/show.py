"""A report of the doctor as text."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from thinwire.base import units
from thinwire.doctor.links import slow_links

_MOST_ROWS = 8
_WIDTH = 100
_START = (
    "  srun thinwire doctor",
    "  torchrun --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 -m thinwire doctor",
)


def text(report: Mapping[str, Any]) -> str:
    """All sections but the advice."""
    parts = [_title(report), _section("Machine", _machines(report["nodes"]))]
    if report["workers"] > 1:
        parts.append(_section("Workers", [*_agreement(report)]))
    parts.append(_section("Links", [*_links(report), *(f"hint: {hint}" for hint in report["hints"])]))
    return "\n\n".join(parts)


def advice(lines: Sequence[str], about: str) -> str:
    """The last section."""
    return _section(f"What to use for {about}", lines)


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks in words: rank 3, ranks 0 to 4 and 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(part for line in lines for part in _wrapped(line))])


def _wrapped(line: str) -> list[str]:
    """Indented, and broken where it is long; a command is left whole, to be copied."""
    if line.startswith(" ") or len(line) <= _WIDTH:
        return [f"  {line}"]
    return textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _title(report: Mapping[str, Any]) -> str:
    version = report["nodes"][0]["versions"]["thinwire"] or "(not installed)"
    workers, nodes = report["workers"], len(report["nodes"])
    where = f"{workers} workers on {units.count(nodes, 'node')}" if workers > 1 else "one process"
    return f"Thinwire {version}, {where}"


def _machines(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per fact; where nodes differ, each value with its nodes."""
    hosts = list(dict.fromkeys(node["host"] for node in nodes))
    rows = [("hosts" if len(nodes) > 1 else "host", ", ".join(hosts[:_MOST_ROWS]) + ", …" * (len(hosts) > _MOST_ROWS))]
    facts = [_facts(node, alone=len(nodes) == 1) for node in nodes]
    for name in facts[0]:
        by_value: dict[str, list[str]] = {}
        for number, own in enumerate(facts):
            by_value.setdefault(own[name], []).append(str(number))
        each = [f"{value} on node{'s' * (len(own) > 1)} {', '.join(own)}" for value, own in by_value.items()]
        rows.append((name, "; ".join(each if len(each) > 1 else by_value)))
    return _table(rows)


def _facts(node: Mapping[str, Any], *, alone: bool) -> dict[str, str]:
    versions, gpus = node["versions"], node["gpus"]
    kinds = {name: gpus.count(name) for name in gpus}
    bench = "can make slow links here" if node["netbench"] is None else f"not here: {node['netbench']}"
    found = {
        "cores": str(node["cores"]),
        "GPUs": ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "none",
        "Python": versions["Python"],
        "torch": versions["torch"] + (f", CUDA {versions['CUDA']}" if versions["CUDA"] else ""),
        "backends": _backends(node),
        "bf16": {"GPU": "yes, on the GPU", "CPU": "yes, on the CPU"}.get(
            node["bf16"], "emulated: works as a code, slow to compute in"
        ),
    }
    return found | ({"netbench": bench} if alone else {})


def _backends(node: Mapping[str, Any]) -> str:
    there = node["backends"]
    if not there:
        return "none: this torch has no gloo; install one that has"
    return ", ".join(there) + ("" if "nccl" in there else "; no nccl in this torch, which is for GPUs only")


def _agreement(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["differences"]:
        yield f"versions, backends and settings are the same on all {report['workers']}"
        return
    yield "these differ; make them the same on every node:"
    for difference in report["differences"]:
        values = [f"{own['value'] or 'not set'} on {rank_names(own['ranks'])}" for own in difference["values"]]
        yield f"  {difference['what']}: {'; '.join(values)}"


def _links(report: Mapping[str, Any]) -> list[str]:
    if report["workers"] == 1:
        return ["not measured: one process has none. Start the doctor on every node, by one of these:", *_START]
    found = report["links"]
    if found is None:
        return ["not measured: gloo cannot connect the workers"]
    node_of = {rank: node["node"] for node in report["nodes"] for rank in node["ranks"]}
    rows: list[tuple[str, ...]] = [("", "rate", "round trip", "interface")] if _any(found) else []
    rows += _rows(found["between"], lambda rank: f"node {node_of[rank]}")
    if found["inside"]:
        rows.append(_inside(found["inside"]))
    lines = _table(rows, right=(1, 2))
    if any("nccl" in node["backend"] for node in report["nodes"]):
        lines.append("measured with gloo over TCP; nccl may be faster")
    if not found["between"]:
        lines.append("all workers are on one machine: there is no link between nodes")
    return [*lines, *_slow(found["between"], node_of)]


def _any(found: Mapping[str, Any]) -> bool:
    return bool(found["between"] or found["inside"])


def _rows(links: Sequence[Mapping[str, Any]], name: Any) -> Iterator[tuple[str, ...]]:
    ordered = sorted(links, key=lambda link: link["bits_per_second"])
    shown = links if len(links) <= _MOST_ROWS else ordered[:_MOST_ROWS]
    for link in shown:
        yield (f"{name(link['source'])} → {name(link['target'])}", *_figures(link))
    if len(links) > _MOST_ROWS:
        yield f"{len(links) - _MOST_ROWS} others, up to", *_figures(ordered[-1])


def _inside(links: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    slowest = min(links, key=lambda link: link["bits_per_second"])
    return "inside a node" + (", slowest" if len(links) > 2 else ""), *_figures(slowest)


def _figures(link: Mapping[str, Any]) -> tuple[str, str, str]:
    rate = units.rate(float(f"{link['bits_per_second']:.3g}"))
    return rate, units.time(float(f"{link['round_trip_s']:.2g}")), link["interface"] or "?"


def _slow(links: Sequence[Mapping[str, Any]], node_of: Mapping[int, int]) -> Iterator[str]:
    below = slow_links(list(map(dict, links)))
    if not below:
        return
    slowest = below[0]
    factor = max(link["bits_per_second"] for link in links) / slowest["bits_per_second"]
    ends = [{node_of[link["source"]], node_of[link["target"]]} for link in below]
    common = set.intersection(*ends)
    yield (
        f"slow: node {node_of[slowest['source']]} → node {node_of[slowest['target']]}, {factor:.2g} times slower than "
        "the fastest link"
    )
    if len(common) == 1 and len(below) > 1:
        yield f"      node {common.pop()} is at the end of every slow link: look at its cable, port or interface"


def _table(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> list[str]:
    """Columns under one another."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        .rstrip()
        for row in rows
    ]  # fmt: skip
