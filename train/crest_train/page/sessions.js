/* ---- table of sessions ---- */

const COLUMNS = [
  ["step", "Step"],
  ["group", "Group"],
  ["seed", "Seed"],
  ["turns", "Turns"],
  ["reward", "Reward"],
  ["success", "Success"],
  ["tokens", "Tokens"],
  ["actions", "Actions"],
  ["credit", "Credit"],
  ["errors", "Errors"],
];
const ABOUT = {
  turns: "turns reached, of those the session has",
  reward: "mean over the session's turns",
  success: "every turn earned 1",
  tokens: "written by the policy",
  credit: "mean over the policy's tokens",
  errors: "actions that failed or were cut short",
};
const failed = (action) => action.cut || action.info.error === true;

function summary(session, index) {
  const credits = valuesOf(session, "credit");
  return {
    index,
    step: session.batch,
    group: session.group,
    seed: session.seed,
    turns: session.turn_reward.length,
    reward: sum(session.turn_reward) / session.num_turns,
    success: session.turn_reward.filter((reward) => reward === 1).length === session.num_turns ? 1 : 0,
    tokens: sum(session.actions.map((action) => action.tokens.length)),
    actions: session.actions.length,
    credit: credits.length ? sum(credits) / credits.length : undefined,
    errors: session.actions.filter(failed).length,
  };
}

/** The test that a filter such as 3, >0.5, <=2 or 2..5 makes; undefined where it is none. */
function testOf(filter) {
  const [, how, low, high] =
    filter.replaceAll("−", "-").match(/^\s*(<=|>=|<|>|=)?\s*(-?\d*\.?\d+)\s*(?:\.\.\s*(-?\d*\.?\d+))?\s*$/) ?? [];
  if (low === undefined) return undefined;
  if (high !== undefined) return (value) => value >= low && value <= high;
  const near = (value) => Math.abs(value - low) < 5e-4;
  return (
    {
      "<": (value) => value < low,
      "<=": (value) => value <= low,
      ">": (value) => value > low,
      ">=": (value) => value >= low,
    }[how] ?? near
  );
}

const textOf = (session) =>
  (session.searched ??= [
    session.system,
    ...session.requests,
    ...session.actions.flatMap((action) => [action.text, action.observation ?? ""]),
  ]
    .join("\n")
    .toLowerCase());

function found() {
  const tests = Object.entries(state.filters)
    .map(([key, filter]) => [key, testOf(filter)])
    .filter(([, test]) => test);
  const wanted = state.search.toLowerCase();
  const rows = run.rows.filter(
    (row) =>
      tests.every(([key, test]) => test(row[key])) && (!wanted || textOf(run.sessions[row.index]).includes(wanted)),
  );
  const order = state.down ? -1 : 1;
  return rows.sort(
    (a, b) => order * ((a[state.sort] ?? -Infinity) - (b[state.sort] ?? -Infinity) || 0) || a.index - b.index,
  );
}

function table() {
  if (!run.sessions.length) {
    const why = run.records_every
      ? `The first are kept at step ${Math.min(run.records_every, run.steps)}.`
      : "The run was told to keep none: run.records = 0.";
    return element("p", { class: "empty" }, `No sessions are recorded. ${why}`);
  }
  const body = element("tbody");
  const count = element("span", { class: "soft", "aria-live": "polite" });
  const back = element("button", { type: "button", onclick: () => turn(-1) }, "Previous");
  const on = element("button", { type: "button", onclick: () => turn(1) }, "Next");
  const turn = (by) => ((state.page += by), fill());
  const heads = COLUMNS.map(([key, name]) =>
    element(
      "th",
      { scope: "col" },
      element("button", { type: "button", title: ABOUT[key], onclick: () => sortBy(key) }, name),
      filterOf(key, () => ((state.page = 0), fill())),
    ),
  );
  const sortBy = (key) => {
    state.down = state.sort === key ? !state.down : true;
    state.sort = key;
    state.page = 0;
    fill();
  };
  const fill = () => {
    const rows = found();
    const pages = Math.max(1, Math.ceil(rows.length / PAGE_ROWS));
    state.page = Math.min(state.page, pages - 1);
    body.replaceChildren(...rows.slice(state.page * PAGE_ROWS, (state.page + 1) * PAGE_ROWS).map(rowOf));
    count.textContent = `${rows.length} of ${run.rows.length} sessions, page ${state.page + 1} of ${pages}`;
    back.disabled = state.page === 0;
    on.disabled = state.page === pages - 1;
    COLUMNS.forEach(([key, name], i) => {
      const sorted = state.sort === key;
      heads[i].setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
      heads[i].firstChild.textContent = name + (sorted ? (state.down ? " ↓" : " ↑") : "");
    });
  };
  const search = element("input", {
    type: "search",
    placeholder: "Search requests, actions and replies",
    "aria-label": "Search requests, actions and replies",
    value: state.search,
    oninput: () => ((state.search = search.value), (state.page = 0), fill()),
  });
  const clear = element(
    "button",
    { type: "button", onclick: () => (Object.assign(state, { filters: {}, search: "", page: 0 }), route()) },
    "Clear filters",
  );
  fill();
  return element(
    "div",
    {},
    element("div", { class: "bar" }, search, clear, count, back, on),
    element(
      "div",
      { class: "scroll" },
      element(
        "table",
        {},
        element(
          "thead",
          {},
          element("tr", {}, ...heads, element("th", { class: "request", scope: "col" }, "First request")),
        ),
        body,
      ),
    ),
    element("p", { class: "soft" }, "Under a column's name: a number, or >0.5, <=2, 2..5. ", partly()),
  );
}

/** What of the run's sessions is not on the page, in words. */
function partly() {
  const counts = new Map();
  for (const { step } of run.rows) counts.set(step, (counts.get(step) ?? 0) + 1);
  const cut = [...counts]
    .filter(([, count]) => count < run.sessions_per_step)
    .map(([step, count]) => `of step ${step} ${count} of ${run.sessions_per_step} sessions were kept`);
  if (run.left_out.length) cut.push(`steps ${run.left_out.join(", ")} are in records/, and left out here for size`);
  return cut.length
    ? `Not all is here: ${cut.join("; ")}.`
    : `All ${run.sessions_per_step} sessions of every recorded step are here.`;
}

function filterOf(key, refill) {
  const take = ({ target }) => {
    state.filters[key] = target.value;
    target.setAttribute("aria-invalid", target.value.trim() !== "" && !testOf(target.value));
    refill();
  };
  const label = { "aria-label": `filter by ${key}`, oninput: take };
  if (key !== "success")
    return element("input", { ...label, inputmode: "decimal", size: 5, value: state.filters[key] ?? "" });
  const choices = [
    ["", "any"],
    ["1", "yes"],
    ["0", "no"],
  ];
  return element(
    "select",
    label,
    ...choices.map(([value, name]) =>
      element("option", { value, selected: (state.filters.success ?? "") === value }, name),
    ),
  );
}

const verdict = (success) => element("span", { class: success ? "good" : "bad" }, success ? "✓ yes" : "✗ no");

function rowOf(row) {
  const session = run.sessions[row.index];
  const cells = {
    step: element(
      "a",
      { href: `#${row.index}`, "aria-label": `open session of seed ${row.seed}, step ${row.step}, group ${row.group}` },
      `${row.step}`,
    ),
    turns: `${row.turns} / ${session.num_turns}`,
    success: verdict(row.success),
    credit: shown(row.credit, true),
    reward: shown(row.reward),
  };
  return element(
    "tr",
    { onclick: () => (location.hash = row.index) },
    ...COLUMNS.map(([key]) => element("td", {}, cells[key] ?? `${row[key]}`)),
    element("td", { class: "request" }, visible(session.requests[0] ?? "").slice(0, 200)),
  );
}
