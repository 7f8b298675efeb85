"""The page of a run, in a real browser: what it shows, sorts, filters and colours, of records written by hand."""

import json
import shutil

import pytest
from crest_train.recording import read_sessions
from crest_train.view import page_data, write_view
from typer.testing import CliRunner
from view_run import HOSTILE, session, write_run

SESSIONS = [
    session(11, 0, [1.0, 1.0], [0.8, -0.4, 0.0, 0.2]),
    session(11, 0, [1.0, 0.0], [-0.8, 0.1, -0.321, 0.0], reply=HOSTILE),
    session(12, 1, [0.0], [0.0, 0.0, 0.0, 0.0], reply="long " * 20_000),
    session(12, 1, [0.25, 0.5], [0.0, 0.0, 0.0, 0.0], reply="\U0001f469\u200d\U0001f680 needle"),
]


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """A function that writes the page of sessions and opens it; whatever a page complains of or asks for fails."""
    troubles = []

    def open_page(sessions, **context):
        run = write_run(tmp_path_factory.mktemp("runs") / "run", sessions)
        page = browser.new_context(**context).new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: request.url.startswith("file:") or troubles.append(request.url))
        page.goto(write_view(run, run / "view.html").as_uri())
        page.wait_for_selector("h2, .empty")
        return page

    yield open_page
    assert troubles == []


@pytest.fixture(scope="module")
def page(opened):
    return opened(SESSIONS)


def go(page, place):
    page.goto(page.url.split("#")[0] + place)
    page.reload()  # in the same document, going is not waited for
    page.wait_for_selector("h2, .turn")


def column(page, number):
    return page.locator(f"tbody td:nth-child({number})").all_inner_texts()


def number_of(page, name):
    return page.locator(f"#numbers dd[data-number={name}]").inner_text()


def test_curves_tell_their_values_to_pointer_and_keyboard(page):
    go(page, "#")
    curve = page.locator("figure", has=page.locator("h3", has_text="Turn success")).first
    assert curve.locator("li").all_inner_texts() == ["sampled 0.5", "held out 0.4"]
    curve.locator("svg[role=img]").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert curve.locator("li").all_inner_texts() == ["sampled 0.25", "held out 0"]
    assert curve.locator(".top").inner_text().split("\n")[-1] == "step 2"


def test_table_sorts_filters_and_searches(page):
    go(page, "#")
    assert column(page, 6) == ["✓ yes", "✗ no", "✗ no", "✗ no"]
    page.get_by_role("button", name="Reward").click()
    assert column(page, 5) == ["1", "0.5", "0.375", "0"]
    page.get_by_role("button", name="Reward").click()
    assert column(page, 5) == ["0", "0.375", "0.5", "1"]
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Reward")
    page.get_by_label("filter by reward").fill(">0.3")
    page.get_by_label("filter by seed").fill("12")
    assert column(page, 5) == ["0.375"]
    page.get_by_label("filter by seed").fill("twelve")
    assert page.locator("[aria-invalid=true]").count() == 1 and len(column(page, 5)) == 3
    page.get_by_label("filter by seed").fill("")
    page.get_by_label("filter by reward").fill("0.3..0.5")
    assert column(page, 5) == ["0.375", "0.5"]
    page.get_by_label("filter by reward").fill(">0.4")
    page.get_by_label("filter by success").select_option("no")
    assert column(page, 5) == ["0.5"]
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_role("searchbox").fill("NEEDLE")
    assert column(page, 3) == ["12"] and "1 of 4 sessions" in page.inner_text(".bar")
    page.get_by_role("button", name="Clear filters").click()
    assert len(column(page, 1)) == 4


def test_numbers_of_a_known_token_by_mouse_and_keyboard(page):
    """The second session's third token: credit -0.321, probability exp(-0.5)."""
    go(page, "#1")
    token = page.locator(".token").nth(2)
    token.hover()
    assert page.locator("#numbers code").inner_text() == '" mv"'
    wanted = {"credit": "−0.321", "entropy": "0.5", "surprisal": "0.5", "ratio": "0.75", "probability": "0.607"}
    assert {name: number_of(page, name) for name in wanted} == wanted
    assert page.locator("#numbers dd[data-number=teacher_gap]").count() == 0
    page.mouse.move(0, 0)
    assert not page.locator("#numbers").is_visible()
    page.locator(".token").first.focus()
    assert number_of(page, "credit") == "−0.8"
    page.keyboard.press("ArrowRight")
    assert number_of(page, "credit") == "+0.1"


def test_colour_follows_the_measure_and_is_not_alone(page):
    go(page, "#0")
    tokens = page.locator(".token")

    def look(i):
        classes = set(tokens.nth(i).get_attribute("class").split()) & {"above", "below"}
        return classes, tokens.nth(i).evaluate("token => getComputedStyle(token).backgroundColor")

    assert [look(i)[0] for i in range(4)] == [{"above"}, {"below"}, set(), {"above"}]
    clear = look(2)[1]
    assert clear.endswith(", 0)") and len({look(i)[1] for i in range(4)}) == 4
    page.get_by_role("button", name="Ratio").click()
    assert [look(i)[0] for i in range(4)] == [{"above"}, set(), {"below"}, set()]
    page.get_by_role("button", name="Entropy").click()
    assert [look(i)[0] for i in range(4)] == [set()] * 4 and len({look(i)[1] for i in range(4)}) == 4
    assert page.locator(".scale").inner_text().replace("\n", " ").split() == ["0", "0.75", "nats", "or", "more"]
    assert page.get_by_role("button", name="Teacher gap").is_disabled()
    page.get_by_role("button", name="Credit").click()


def test_siblings_side_by_side(page):
    go(page, "#0")
    assert page.locator(".siblings a").all_inner_texts() == ["✓✓ 1", "✓✗ 0.5"]
    page.get_by_role("button", name="Siblings").click()
    assert [text.split("seed")[0] for text in page.locator(".head").all_inner_texts()] == ["this session, ", ""]
    turns = page.locator(".turn")
    assert [turns.nth(i).get_attribute("aria-label") for i in range(4)] == ["turn 1", "turn 1", "turn 2", "turn 2"]
    assert ["reward 1" in turns.nth(i).inner_text() for i in range(4)] == [True, True, True, False]


def test_hostile_and_long_text_is_text(page):
    go(page, "#1")
    assert page.title() == "crest on desk" and page.locator("img").count() == 0
    shown = page.locator(".tool .text").first.inner_text()
    assert shown == HOSTILE.replace("\x1b", "␛")
    go(page, "#2")
    long = page.locator(".tool .text").first
    assert len(long.inner_text()) < 4000
    page.get_by_role("button", name="show all 100000 characters").click()
    assert len(long.text_content()) == 100_000
    assert "".join(page.locator("details pre").last.all_text_contents()) == "".join(SESSIONS[2]["texts"])


def test_dark_as_the_system_has_it_and_by_the_button(opened):
    page = opened(SESSIONS[:1], color_scheme="dark")

    def brightness():
        shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, shade.removeprefix("rgb(").removesuffix(")").split(",")))

    assert brightness() < 150
    page.get_by_role("button", name="light and dark").click()
    assert brightness() > 650


def test_a_run_without_records_and_one_of_a_thousand_sessions(opened):
    assert "No sessions are recorded" in opened([]).locator(".empty").inner_text()
    many = [session(i, i // 2, [1.0, i % 2], [0.1] * 4, step=1 + i // 500) for i in range(1000)]
    page = opened(many)
    assert len(column(page, 1)) == 50 and "1000 of 1000 sessions, page 1 of 20" in page.inner_text(".bar")
    page.get_by_label("filter by seed").fill("777")
    page.locator("tbody tr").click()
    assert "request 777" in page.locator(".user").first.inner_text()
    page.go_back()
    assert column(page, 3) == ["777"]


def test_page_data_leaves_out_the_first_steps_where_there_are_too_many(tmp_path):
    run = write_run(tmp_path / "run", [session(k, 0, [1.0], [0.0] * 4, step=k) for k in (1, 2, 3)])
    size = (run / "records" / "step-00003.jsonl").stat().st_size
    data = page_data(run, most_bytes=2 * size)
    assert data["left_out"] == [1] and [one["seed"] for one in data["sessions"]] == [2, 3]
    assert [one["batch"] for one in page_data(run, most_bytes=0)["sessions"]] == [3]


def test_what_is_no_run_or_damaged_is_told(tmp_path):
    from crest_train.cli import app

    assert "holds no run" in str(CliRunner().invoke(app, ["view", str(tmp_path)]).exception)
    run = write_run(tmp_path / "run", [SESSIONS[0]])
    done = CliRunner().invoke(app, ["view", str(run), "--output", str(tmp_path / "page.html")])
    assert done.exit_code == 0 and (tmp_path / "page.html").as_uri() in done.output.replace("\n", "")
    path = run / "records" / "step-00002.jsonl"
    path.write_text(path.read_text() + json.dumps(SESSIONS[0] | {"texts": ["a"]}) + "\n")
    assert sum(1 for _ in zip(range(1), read_sessions(path, "RUN"), strict=False)) == 1
    with pytest.raises(ValueError, match=r"^RUN: .*step-00002.jsonl, line 2: 1 texts for 6 ids$"):
        write_view(run, run / "view.html")
