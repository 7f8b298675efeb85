"""Calls in the text of a policy: parsed, and run on a small API of our own, without evaluating any of it."""

import warnings

import pytest
from crest_train.environments.bfcl_calls import BadCall, Call, parse, run
from lamp import SHARED, Lamp


@pytest.fixture(autouse=True)
def red(monkeypatch):
    monkeypatch.setitem(SHARED, "colour", "red")


# ---- parsing


@pytest.mark.parametrize(
    "text, calls, ends",
    [
        ("cd(folder='a')", [("cd", (), {"folder": "a"})], False),
        ("[cd(folder='a'), ls()]", [("cd", (), {"folder": "a"}), ("ls", (), {})], False),
        ("cd('a'), ls(a=True)", [("cd", ("a",), {}), ("ls", (), {"a": True})], False),
        ("cd('a')\nls()\n", [("cd", ("a",), {}), ("ls", (), {})], False),
        ("cd('a')\ndone", [("cd", ("a",), {})], True),
        ("  ```python\nf(x=[1, -2.5, {'k': None}])\n```", [("f", (), {"x": [1, -2.5, {"k": None}]})], False),
        ("[]", [], True),
        ("", [], True),
        ("done", [], True),
        ("done()", [], True),
        ("f()\ndone()", [("f", (), {})], True),
        ("The file was moved. (I think.)", [], True),
        ("I do not know which file you mean", [], True),
    ],
)
def test_parse(text, calls, ends):
    found, found_end = parse(text)
    assert ([(call.name, call.args, call.kwargs) for call in found], found_end) == (calls, ends)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("cd(folder='a'", "cannot|never closed|read"),
        ("I will call cd(folder='a') now", "read"),
        ("cd(folder=ls())", "literals"),
        ("cd(folder=name)", "literals"),
        ("f(x='a' * 9)", "literals"),
        ("f(x={[]: 1})", "literals"),
        ("f(**{'x': 1})", "not unpacked"),
        ("f(*[1])", "literals"),
        ("os.system('ls')", "made of calls"),
        ("f()()", "made of calls"),
        ("x = f()", "made of calls"),
        ("import os\nf()", "made of calls"),
        ("done\nf()", "made of calls"),
        ("done\nf()\ndone", "made of calls"),
        ("# f()", "made of calls"),
        ("[]  # f()", "made of calls"),
        ("[f(), 3]", "made of calls"),
        ("f(x=1" + "0" * 30 + ")", "larger"),
        ("f(x=" + "9" * 5000 + ")", "read"),
        ("f(x=1, x=2)", "given twice"),
        ("f(x=" + "(" * 2000 + ")" * 2000 + ")", "read"),
        ("f(x=" + "-" * 7000 + "1)", "read|literals"),
        ("f(" + "x" * 9000 + ")", "too long"),
        ("f(\0)", "read"),
        ("f('\ud800')", "read"),
    ],
)
def test_what_is_no_call_is_refused_with_the_reason(text, reason):
    with pytest.raises(BadCall, match=reason):
        parse(text)


def test_odd_escapes_warn_nobody():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse(r"f(x='\d')")[0][0].kwargs == {"x": r"\d"}


# ---- running


def _call(name, *args, **kwargs):
    return Call(name, args, kwargs, "")


@pytest.mark.parametrize(
    "call, text, failed",
    [
        (_call("switch", on=True), '{"on": true}', False),
        (_call("switch", on=False), '{"error": "switch: it is so already"}', True),
        (_call("colour", "blue"), "None", False),
        (_call("write", "hi"), "hi", False),
        (_call("power", 2, 0.5j), "{'result': (0.9405", False),
        (_call("fly"), "Error during execution: name 'fly' is not defined", True),
        (_call("_secret"), "Error during execution: name '_secret' is not defined", True),
        (_call("__init__"), "Error during execution: name '__init__' is not defined", True),
        (_call("on"), "Error during execution: name 'on' is not defined", True),
        (_call("switch"), "Error during execution: Lamp.switch() missing 1 required", True),
        (_call("power", 2, "a"), "Error during execution: unsupported operand", True),
        (_call("power", 9, 10**9), "Error during execution: exponent is limited to 1000", True),
        (_call("power", base=9, exponent=-(10**9)), "Error during execution: exponent is limited to 1000", True),
    ],
)
def test_run(call, text, failed):
    result = run(call, {"Lamp": Lamp()})
    assert result.text.startswith(text) and result.failed is failed


def test_a_later_instance_wins_a_shared_name():
    class Other:
        def look(self):
            return "other"

    assert run(_call("look"), {"Lamp": Lamp(), "Other": Other()}).text == "other"


def test_process_wide_precision_is_put_back():
    import decimal

    import mpmath

    class Careless:
        def set(self):
            mpmath.mp.dps = 3
            decimal.getcontext().prec = 3
            return str(decimal.Decimal(2).sqrt())

    before = mpmath.mp.dps, decimal.getcontext().prec
    assert run(_call("set"), {"Careless": Careless()}).text == "1.41"
    assert (mpmath.mp.dps, decimal.getcontext().prec) == before
