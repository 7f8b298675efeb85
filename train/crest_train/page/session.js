/* ---- one session, or all of its group ---- */

const mark = (reward) => (reward === undefined ? "·" : reward === 1 ? "✓" : reward === 0 ? "✗" : "~");
const marks = (session) => Array.from({ length: session.num_turns }, (_, k) => mark(session.turn_reward[k])).join("");

function sessionPage(index, side) {
  const session = run.sessions[index];
  const row = run.rows[index];
  const group = run.rows
    .filter((other) => other.step === row.step && other.group === row.group)
    .map((other) => other.index);
  const columns = side ? group : [index];
  const sessions = columns.map((place) => run.sessions[place]);
  const order = found().map((other) => other.index);
  const neighbour = (by) => order[order.indexOf(index) + by];
  const step = (by, name) =>
    element(
      "button",
      {
        type: "button",
        disabled: order.indexOf(index) < 0 || neighbour(by) === undefined,
        onclick: () => (location.hash = `${neighbour(by)}${side ? "+" : ""}`),
      },
      name,
    );
  const turns = Math.max(
    ...sessions.map(({ actions, turn_reward }) => Math.max(turn_reward.length, 1 + (actions.at(-1)?.turn ?? -1))),
  );
  const cells = Array.from({ length: turns }, (_, k) => sessions.map((one) => turnOf(one, k))).flat();
  const heads = side
    ? sessions.map((one, i) =>
        element(
          "div",
          { class: "head" },
          columns[i] === index ? element("b", {}, "this session, ") : null,
          `seed ${one.seed}, reward ${shown(run.rows[columns[i]].reward)}, `,
          element("span", { class: "marks" }, marks(one)),
        ),
      )
    : [];
  const grid = element(
    "div",
    {
      class: side ? "columns side" : "columns",
      style: `grid-template-columns: repeat(${columns.length}, minmax(${side ? 300 : 0}px, 1fr))`,
    },
    ...heads,
    ...cells,
  );
  listen(grid);
  const legend = element("span", { class: "scale" });
  const buttons = Object.entries(MEASURES).map(([key, { name }]) =>
    element("button", { type: "button", "data-measure": key, onclick: () => ((state.measure = key), paint()) }, name),
  );
  const paint = () => {
    const known = Object.keys(MEASURES).filter((key) => sessions.some((one) => valuesOf(one, key).length));
    const measure = known.includes(state.measure) ? state.measure : known[0];
    for (const button of buttons) {
      button.setAttribute("aria-pressed", button.dataset.measure === measure);
      button.disabled = !known.includes(button.dataset.measure);
      const absent = "not recorded: the method of this run does not ask for it";
      button.title = button.disabled ? absent : MEASURES[button.dataset.measure].about;
    }
    if (!measure) return legend.replaceChildren("no numbers are recorded of these tokens");
    const full = reach(sessions, measure);
    for (const token of grid.querySelectorAll(".token"))
      colour(token, valueOf(measure, token.action, token.place), measure, full);
    legend.replaceChildren(...scaleOf(measure, full));
  };
  paint();
  const cut = session.cut ? ", cut at the model's context" : "";
  const played = `${row.turns} of ${session.num_turns} turns reached, ${row.actions} actions, ${row.tokens} tokens${cut}`;
  const facts = `Step ${row.step}, group ${row.group}, seed ${row.seed}. Reward ${shown(row.reward)}, ${played}. `;
  return element(
    "div",
    {},
    element(
      "p",
      { class: "bar" },
      element("a", { href: "#" }, "← All sessions"),
      step(-1, "Previous"),
      step(1, "Next"),
      element("span", {}, facts, "Success: ", verdict(row.success)),
    ),
    element(
      "div",
      { class: "tools" },
      element(
        "div",
        { class: "bar" },
        element("span", { class: "group", role: "group", "aria-label": "colour tokens by" }, ...buttons),
        legend,
        group.length > 1
          ? element(
              "button",
              {
                type: "button",
                "aria-pressed": `${side}`,
                onclick: () => (location.hash = side ? index : `${index}+`),
              },
              "Siblings side by side",
            )
          : null,
      ),
    ),
    group.length > 1
      ? element(
          "ul",
          { class: "siblings", "aria-label": "rollouts of the same group" },
          ...group.map((place) =>
            element(
              "li",
              {},
              element(
                "a",
                { href: `#${place}${side ? "+" : ""}`, "aria-current": place === index ? "true" : undefined },
                element("span", { class: "marks" }, marks(run.sessions[place])),
                ` ${shown(run.rows[place].reward)}`,
              ),
            ),
          ),
        )
      : null,
    session.system ? element("details", {}, element("summary", {}, "System text"), long(session.system, "pre")) : null,
    grid,
    session.texts.length
      ? element(
          "details",
          {},
          element("summary", {}, "The session as the policy read it"),
          long(session.texts.join(""), "pre"),
        )
      : null,
  );
}

function scaleOf(measure, full) {
  const { centre, unit } = MEASURES[measure];
  const after = unit ? ` ${unit}` : "";
  if (!full) return [`all ${shown(centre ?? 0)}`];
  const ends =
    centre === undefined
      ? ["0", `${shown(full)}${after} or more`]
      : [`${shown(centre - full, centre === 0)} or less`, `${shown(centre + full, centre === 0)}${after} or more`];
  const ramp =
    centre === undefined
      ? "transparent, color-mix(in srgb, var(--much) 60%, transparent)"
      : "color-mix(in srgb, var(--below) 60%, transparent), transparent, color-mix(in srgb, var(--above) 60%, transparent)";
  return [ends[0], element("i", { style: `background: linear-gradient(to right, ${ramp})` }), ends[1]];
}

function turnOf(session, k) {
  const reward = session.turn_reward[k];
  const actions = session.actions.filter((action) => action.turn === k);
  if (reward === undefined && !actions.length)
    return element("section", { class: "turn" }, element("p", { class: "soft" }, `Turn ${k + 1} was not reached`));
  const said = (who, text, mistaken) =>
    element(
      "div",
      { class: `said ${who}` },
      element(
        "span",
        { class: "who" },
        who,
        mistaken ? element("b", { class: "bad", title: "failed, says the environment, or cut short" }, " ✗") : null,
      ),
      text,
    );
  return element(
    "section",
    { class: "turn", "aria-label": `turn ${k + 1}` },
    element(
      "header",
      {},
      element("b", {}, `Turn ${k + 1}`),
      element(
        "span",
        { class: reward === 1 ? "good" : "bad" },
        reward === undefined ? "no reward" : `${mark(reward)} reward ${shown(reward)}`,
      ),
    ),
    session.requests[k] === undefined ? null : said("user", long(session.requests[k])),
    ...actions.flatMap((action) => [
      said(
        "policy",
        element("div", { class: "text" }, ...action.tokens.map((id, i) => tokenOf(session, action, id, i))),
        failed(action),
      ),
      action.observation === undefined ? null : said("tool", long(action.observation)),
    ]),
  );
}

function long(text, kind = "div") {
  const block = element(kind, { class: kind === "div" ? "text" : undefined }, visible(text.slice(0, LONG_TEXT)));
  if (text.length <= LONG_TEXT) return block;
  const rest = element(
    "button",
    { type: "button", onclick: () => block.replaceChildren(visible(text)) },
    `… show all ${text.length} characters`,
  );
  block.append(" ", rest);
  return block;
}

function tokenOf(session, action, id, i) {
  const text = session.texts.length ? session.texts[action.start + i] : `#${id} `;
  const kind = text === "" ? " part" : /^\s*\n\s*$/.test(text) ? " break" : "";
  const token = element("span", { class: `token${kind}`, tabindex: -1, "aria-describedby": "numbers" }, visible(text));
  return Object.assign(token, { action, place: i, id, text });
}
