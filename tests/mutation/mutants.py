"""Mutants of the code that must not be wrong: how many does the quick suite notice?

    make mutants

1. `cover OUT` runs the quick suite and notes which file of tests executes which line, workers included.
2. `run OUT` draws lines by a seed and changes each in one way, by cosmic-ray. It runs the files of tests that execute
   the line, those closest to it first, until one fails. Whatever fails has noticed the mutant, and so has what hangs.

`OUT/mutants.jsonl` has one line per mutant; those in it are not tried again. Use a clone: files of `src` change.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cosmic_ray.plugins
import coverage
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code, use_mutation

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src" / "thinwire"
MUTATED = ("methods", "exchange", "shape", "comm", "codecs", "factor", "elastic", "checkpoint")
"""What trains, sends, decomposes, saves and survives."""
SEED, COUNT = 36, 120
AT_MOST_S = 100
"""Of tests for a mutant, as long as they took under coverage; one that outlives them is a survivor."""
HANGS_S = 240


class Mutant(NamedTuple):
    """One change of one line."""

    module: str
    line: int
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.module}:{self.line} {self.operator} {self.occurrence}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cover", "run"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--part", default="0/1", help="I/N: every Nth mutant from the Ith on, for several clones")
    parser.add_argument("--again", action="store_true", help="try survivors again")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    cover(given.out.resolve()) if given.what == "cover" else run(given)


# Which file of tests executes which line.


def cover(out: Path) -> None:
    """Run the quick suite, and write lines.json and totals.json."""
    environment = {**os.environ, "MUTANTS": str(out), "PYTHONPATH": f"{HERE}:{ROOT / 'src'}"}
    tool = [sys.executable, "-m", "coverage"]
    settings = f"--rcfile={HERE / 'coverage.ini'}"
    suite = ["-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow", f"--junitxml={out / 'suite.xml'}"]
    subprocess.run([*tool, "run", settings, *suite], cwd=ROOT, env=environment, check=False)
    subprocess.run([*tool, "combine", "-q", settings], cwd=ROOT, env=environment, check=True)
    subprocess.run([*tool, "json", "-q", settings, "-o", out / "all.json"], cwd=ROOT, env=environment, check=True)
    totals = json.loads((out / "all.json").read_text())["totals"]
    (out / "totals.json").write_text(json.dumps(totals, indent=1) + "\n")
    data = coverage.CoverageData(str(out / "data"))
    data.read()
    lines: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        if Path(file).is_relative_to(SOURCE):
            found = data.contexts_by_lineno(file)
            lines[str(Path(file).relative_to(SOURCE))] = {line: sorted(set(of) - {""}) for line, of in found.items()}
    (out / "lines.json").write_text(json.dumps(lines))
    (out / "seconds.json").write_text(json.dumps(seconds(out / "suite.xml")))
    print(json.dumps(totals, indent=1))


def seconds(suite: Path) -> dict[str, float]:
    """What each file of tests takes."""
    took: dict[str, float] = defaultdict(float)
    for case in re.finditer(r'<testcase classname="tests\.([\w.]+)" name=".*?" time="([\d.]+)"', suite.read_text()):
        took[f"tests/{case[1].replace('.', '/')}.py"] += float(case[2])
    return took


# Drawing.


def draw(seed: int, count: int) -> list[Mutant]:
    """Lines by chance, and a change of each by chance."""
    by_line: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for file in sources():
        for mutant in mutants_of(file):
            by_line[mutant.module, mutant.line].append(mutant)
    chance = random.Random(seed)
    return [chosen for line in chance.sample(sorted(by_line), count) if (chosen := one_of(by_line[line], chance))]


def one_of(mutants: list[Mutant], chance: random.Random) -> Mutant | None:
    """One that is Python."""
    for mutant in chance.sample(mutants, len(mutants)):
        kind = cosmic_ray.plugins.get_operator(f"core/{mutant.operator}")
        code = mutate_code((SOURCE / mutant.module).read_text(), kind(), mutant.occurrence)
        try:
            compile(code, mutant.module, "exec")
        except SyntaxError:
            continue
        return mutant
    return None


def sources() -> list[Path]:
    """The files that are changed."""
    found = (SOURCE / name for name in MUTATED)
    return sorted(file for each in found for file in (each.glob("*.py") if each.is_dir() else [each]))


def mutants_of(file: Path) -> Iterator[Mutant]:
    """Every change that cosmic-ray knows, apart from types, which no test can notice."""
    types, tree, text = annotated(file), get_ast_from_path(file), file.read_text().splitlines()
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if kind.arguments():
            continue
        positions = (position for node in ast_nodes(tree) for position in kind().mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            # A `*` between parameters is taken for a product.
            between = text[start[0] - 1][start[1] :].startswith("*,")
            if not between and not any(first <= start < last for first, last in types):
                yield Mutant(str(file.relative_to(SOURCE)), start[0], name.removeprefix("core/"), occurrence)


def annotated(file: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where types stand."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        for type_ in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(type_, ast.expr):
                found.append(((type_.lineno, type_.col_offset), (type_.end_lineno or 0, type_.end_col_offset or 0)))
    return found


# Trying.


def run(given: argparse.Namespace) -> None:
    out: Path = given.out
    lines, took = (json.loads((out / f"{name}.json").read_text()) for name in ("lines", "seconds"))
    file = out / "mutants.jsonl"
    rows = {row["mutant"]: row for row in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    part, parts = map(int, given.part.split("/"))
    for mutant in draw(given.seed, given.count)[part::parts]:
        known = rows.get(mutant.name)
        if known is None or (given.again and known["outcome"] == "survived"):
            rows[mutant.name] = {"mutant": mutant.name} | attempt(mutant, related(mutant, lines, took))
            print(json.dumps(rows[mutant.name])[:300], flush=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    killed = sum(row["outcome"] != "survived" for row in rows.values())
    print(f"{killed} of {len(rows)} noticed")


def related(mutant: Mutant, lines: dict[str, Any], took: dict[str, float]) -> list[str]:
    """Files of tests that execute the line, or the module's functions where it is executed at import; closest first.

    Coverage does not see processes that a test starts by itself, so a file that is named as the module is among them.
    """
    inside = in_functions(SOURCE / mutant.module)
    module = {int(line): tests for line, tests in lines.get(mutant.module, {}).items() if int(line) in inside}
    own = set(module.get(mutant.line, ()))
    if mutant.line not in inside:
        own = {test for tests in module.values() for test in tests}
    own |= {f"tests/test_{Path(mutant.module).stem}.py"} & took.keys()
    words = set(re.split(r"[/_.]", mutant.module)) - {"py", "methods", "exchange", "shape", "comm", "codecs"}

    def close(test: str) -> tuple[float, float]:
        name = set(re.split(r"[/_.]", test))
        share = sum(test in tests for tests in module.values()) / max(1, len(module))
        return -len(words & name) - share, took.get(test, 0.0)

    chosen, spent = [], 0.0
    for test in sorted(own, key=close):
        if spent + took.get(test, 0.0) <= AT_MOST_S:
            chosen, spent = [*chosen, test], spent + took.get(test, 0.0)
    return chosen


def in_functions(file: Path) -> set[int]:
    """Lines that are not executed when the module is imported."""
    bodies = [n.body for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    return {
        line
        for body in bodies
        for part in (body if isinstance(body, list) else [body])
        for line in range(part.lineno, (part.end_lineno or 0) + 1)
    }


def attempt(mutant: Mutant, tests: list[str]) -> dict[str, Any]:
    """Change the line, run the tests, put it back."""
    path = SOURCE / mutant.module
    written = path.stat()
    kind = cosmic_ray.plugins.get_operator(f"core/{mutant.operator}")
    begun = time.monotonic()
    with use_mutation(path, kind(), mutant.occurrence) as (before, after):
        changed = [b.strip() for a, b in zip(before.split("\n"), after.split("\n"), strict=False) if a != b]
        outcome, said = noticed(tests) if tests else ("survived", "no test executes it")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    about = {"now": changed[0] if changed else "", "tests": len(tests), "seconds": round(time.monotonic() - begun)}
    return about | {"outcome": outcome, "by": said}


def noticed(tests: list[str]) -> tuple[str, str]:
    """Whether one of them fails, and which."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )
    try:
        said, _ = process.communicate(timeout=HANGS_S)
    except subprocess.TimeoutExpired:
        return "hung", ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    first = re.search(r"^(FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return ("survived", "") if process.returncode == 0 else ("killed", first[2] if first else said[-200:])


if __name__ == "__main__":
    main()
