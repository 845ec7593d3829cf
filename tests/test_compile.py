"""torch.compile over three cycles in which the ranks change."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import gang
import small
import thinwire


def sharpen(replica: Any, number: int) -> None:
    """Let one direction of two layers grow, so that the next decomposition cuts more."""
    if replica.phase == "rebound":
        with torch.no_grad():
            for layer in (replica.module.conv, replica.module.middle):
                layer.weight[0].add_(0.1 * (number - 5))


def train(rank: int, way: str, backend: Any) -> dict[str, Any]:
    model = small.net()
    optimizer = small.sgd(model, lr=0.01)
    settings = {"backend": backend}
    replica = thinwire.attach(model, optimizer, small.ab(), compile=settings if way == "compile=" else None)
    called = torch.compile(replica, **settings) if way == "torch.compile" else replica
    seen: dict[str, Any] = {"recompilations": [], "ranks": set()}
    for number in range(small.STEPS):
        small.step(called, optimizer, rank, number)
        sharpen(replica, number)
        seen["recompilations"].append(replica.recompilations)
        seen["ranks"].add(tuple(replica.ranks().values()))
    x, _ = small.batch(9, 9)
    seen["bits"] = small.model_bits(replica.module)
    seen["values"] = small.clone(replica.module)
    finished = replica.finish()
    seen["finished"] = bool(torch.allclose(finished.eval()(x), replica.eval()(x), atol=1e-5))
    return seen


def three_cycles(rank: int, way: str) -> dict[str, Any]:
    small.strict()
    graphs: list[int] = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    plain = train(rank, "plain", None)
    assert plain["recompilations"][-1] == len(graphs) == 0
    return {"plain": plain, "compiled": train(rank, way, count), "graphs": graphs}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compile=", "torch.compile"])
def test_three_cycles_with_changing_ranks(way: str) -> None:
    found = gang.run(three_cycles, 2, way, fresh=True)
    assert found[0]["compiled"]["bits"] == found[1]["compiled"]["bits"]
    for worker in found:
        compiled, plain = worker["compiled"], worker["plain"]
        assert len(compiled["ranks"] - {()}) == 3
        assert compiled["ranks"] == plain["ranks"]
        for name, value in plain["values"].items():
            torch.testing.assert_close(compiled["values"][name], value, rtol=1e-4, atol=1e-5)
        assert compiled["finished"]
        check_recompilations(compiled["recompilations"], worker["graphs"])


def check_recompilations(counts: list[int], graphs: list[int]) -> None:
    assert max(graphs) >= 8, "the model was not compiled in one piece"
    assert counts[0] == 0
    for split, merged in ((3, 7), (9, 13), (15, 19)):
        assert counts[split] == counts[split - 1] + 1, "a rank nobody has seen is one recompilation"
        assert counts[merged] == counts[merged - 1], "the full shape is known"
    assert counts[-1] < len(graphs)


class Broken(nn.Module):
    """A model that Dynamo compiles as six functions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x.flatten(1))
        torch._dynamo.graph_break()
        x = x + 1
        torch._dynamo.graph_break()
        x = x + 2
        torch._dynamo.graph_break()
        x = x + 3
        torch._dynamo.graph_break()
        x = x + 4
        torch._dynamo.graph_break()
        return x + 5


def warnings_at_limit(rank: int, limit: int) -> dict[str, Any]:
    torch._dynamo.config.recompile_limit = limit
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = train(rank, "compile=", "eager")
    said = [str(w.message) for w in caught if "torch.compile" in str(w.message)]
    return {"said": said, "compiled": compiled["values"], "plain": train(rank, "plain", None)["values"]}


@pytest.mark.slow
def test_dynamos_limit_is_told_once() -> None:
    """With the usual limit nothing is said: the tests above turn warnings into errors."""
    (found,) = gang.run(warnings_at_limit, 1, 3, fresh=True)
    (message,) = found["said"]
    assert "3 times" in message and "limit of 3" in message and "recompile_limit" in message
    for name, value in found["plain"].items():
        torch.testing.assert_close(found["compiled"][name], value, rtol=1e-4, atol=1e-5)


def break_up(rank: int) -> tuple[int, int]:
    warnings.filterwarnings("error", message="torch.compile has")
    torch._dynamo.config.recompile_limit = 4
    graphs: list[Any] = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Broken()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce(), compile={"backend": count})
    for number in range(3):
        small.step(replica, optimizer, rank, number)
    return len(graphs), replica.recompilations


@pytest.mark.slow
def test_many_functions_are_not_many_recompilations() -> None:
    assert gang.run(break_up, 1, fresh=True) == [(6, 0)]


def test_a_bare_sequential_is_compiled_whole() -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce(), compile={"backend": backend})
    assert replica(torch.randn(3, 8)).shape == (3, 4)
    assert len(graphs) == 1 and set(replica.state_dict()) == {f"{i}.{p}" for i in (0, 2, 4) for p in ("weight", "bias")}


def compressed(rank: int) -> list[float]:
    """Gaps to the plain run of each way of compiling, for a method that acts at the end of a backward pass."""
    small.strict()
    ends, backend = [], {"backend": "eager"}
    for way in ("plain", "compile=", "torch.compile"):
        model = small.net()
        optimizer = small.sgd(model, lr=0.01)
        settings = backend if way == "compile=" else None
        replica = thinwire.attach(model, optimizer, thinwire.PowerSGD(rank=2), compile=settings)
        called = torch.compile(replica, **backend) if way == "torch.compile" else replica
        for number in range(3):
            small.step(called, optimizer, rank, number)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return [float((end - ends[0]).abs().max()) for end in ends[1:]]


@pytest.mark.slow
def test_compressed_methods_compile_too() -> None:
    for gaps in gang.run(compressed, 2, fresh=True):
        assert max(gaps) < 1e-5
