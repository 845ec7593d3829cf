"""What holds for all tests."""

import gc
import signal

import machine

machine.forget_surroundings()

import pytest  # noqa: E402

import gang  # noqa: E402
import needs  # noqa: E402

# A shell that starts the tests in the background makes them ignore Ctrl-C, and so everything they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Until all tests are collected: there is no garbage, and with torch looking for it takes half a second.
gc.disable()


def pytest_addoption(parser) -> None:
    parser.addoption("--golden", choices=("values", "bits", "write"), default="values", help="see test_golden.py")


def pytest_configure(config) -> None:
    for line in machine.lines():
        config.addinivalue_line("filterwarnings", line)
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if hands_out:
        import forked

        forked.fork_from_one_server()
    else:
        import torch

        # Models are tiny: a second thread gains nothing, and where cores are busy each waits for the other.
        torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config) -> bool | None:
    """Importing the sweeps takes seconds, in each process of the tests."""
    if config.option.markexpr != "not slow":
        return None
    whole = "\npytestmark = pytest.mark.slow\n"
    return (collection_path.suffix == ".py" and whole in collection_path.read_text()) or None


# What takes long: begun last, it would run alone.
FIRST = {
    True: ("golden", "elastic", "membership", "ab_groups", "contract", "daso", "user_loops", "poison", "resume"),
    False: ("tune_propulate", "demo", "netbench", "convergence", "plan_quick", "package"),
}
"""Files by whether the suite is the quick one."""


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items) -> None:
    """Real hosts are for `make test-slow`; both suites begin with what takes long."""
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.slow)
    first = [f"test_{name}" for name in FIRST[config.option.markexpr == "not slow"]]
    items.sort(key=lambda item: first.index(item.path.stem) if item.path.stem in first else len(first))


def pytest_collection_finish() -> None:
    """What is there by now stays; collections then look at what tests leave behind."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item) -> None:
    needs.check(item)


def pytest_sessionfinish() -> None:
    gang.end_all()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the last line but one
def pytest_terminal_summary(terminalreporter):
    """Say what the machine did not have, which a green session would hide."""
    yield
    if parts := needs.not_tried(terminalreporter.getreports("skipped")):
        terminalreporter.write_line(f"not tried here: {', '.join(parts)}")
