/* ---- what colours a token ---- */

/* centre: of what has two sides; of: where the value is not recorded as such. */
const MEASURES = {
  credit: { name: "Credit", about: "what the method gives the token", centre: 0 },
  teacher_gap: { name: "Teacher gap", about: "log-prob with the hint minus without", centre: 0, unit: "nats" },
  entropy: { name: "Entropy", about: "of the policy where it wrote the token", unit: "nats" },
  ratio: { name: "Ratio", about: "the token's probability after the step's update over before", centre: 1 },
  surprisal: { name: "Surprisal", about: "minus its log-prob", unit: "nats", of: (action, i) => -action.logp?.[i] },
};
const MORE = { token_weight: "Token weight", distill: "Distillation weight", sampler_logp: "Sampler log-prob" };

function valueOf(measure, action, i) {
  const value = MEASURES[measure].of ? MEASURES[measure].of(action, i) : action[measure]?.[i];
  return Number.isFinite(value) ? value : undefined;
}

const valuesOf = (session, measure) =>
  session.actions
    .flatMap((action) => action.tokens.map((_, i) => valueOf(measure, action, i)))
    .filter((value) => value !== undefined);

/** The distance from the centre that has the full colour: only one token in fifty lies beyond. */
function reach(sessions, measure) {
  const centre = MEASURES[measure].centre ?? 0;
  const sizes = sessions
    .flatMap((session) => valuesOf(session, measure))
    .map((value) => Math.abs(value - centre))
    .filter((size) => size > 0)
    .sort((a, b) => a - b);
  return sizes.length ? sizes[Math.ceil(0.98 * sizes.length) - 1] : 0;
}

function colour(token, value, measure, full) {
  const centre = MEASURES[measure].centre;
  const size = full && value !== undefined ? Math.min(1, Math.abs(value - (centre ?? 0)) / full) : 0;
  const hue = centre === undefined ? "--much" : value > centre ? "--above" : "--below";
  token.style.background =
    size > 0.004 ? `color-mix(in srgb, var(${hue}) ${Math.round(8 + 52 * size)}%, transparent)` : "";
  token.classList.toggle("above", centre !== undefined && size > 0.004 && value > centre);
  token.classList.toggle("below", centre !== undefined && size > 0.004 && value < centre);
}

/* ---- numbers of one token: on hover, on tap, and from the keyboard ---- */

function listen(grid) {
  const tokens = [...grid.querySelectorAll(".token")];
  if (tokens.length) tokens[0].tabIndex = 0;
  tokens.forEach((token, i) => (token.index = i));
  grid.addEventListener("pointerover", (event) => event.target.matches(".token") && point(event.target));
  grid.addEventListener("pointerout", (event) => event.pointerType === "mouse" && point(null));
  grid.addEventListener("focusin", (event) => event.target.matches(".token") && point(event.target));
  grid.addEventListener("focusout", () => point(null));
  grid.addEventListener("click", (event) => event.target.matches(".token") && event.target.focus());
  grid.addEventListener("keydown", (event) => {
    const to = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") return point(null);
    if (!to || !event.target.matches(".token")) return;
    event.preventDefault();
    const next = tokens[Math.max(0, Math.min(tokens.length - 1, event.target.index + to))];
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}

function point(token) {
  numbers.hidden = !token;
  if (!token) return;
  const { action, place } = token;
  const rows = Object.entries(MEASURES).map(([key, { name, unit, centre }]) => [
    key,
    name + (unit ? ` (${unit})` : ""),
    valueOf(key, action, place),
    centre === 0,
  ]);
  rows.push(...Object.entries(MORE).map(([key, name]) => [key, name, action[key]?.[place], key === "distill"]));
  const logp = action.logp?.[place];
  if (logp !== undefined) rows.push(["probability", "Probability", Math.exp(logp), false]);
  const list = rows
    .filter(([, , value]) => value !== undefined)
    .flatMap(([key, name, value, signed]) => {
      const now = key === state.measure ? "now" : undefined;
      return [
        element("dt", { class: now }, name),
        element("dd", { class: now, "data-number": key }, shown(value, signed)),
      ];
    });
  numbers.replaceChildren(
    element("code", {}, JSON.stringify(token.text)),
    ` id ${token.id}`,
    element("dl", {}, ...list),
  );
  const box = token.getBoundingClientRect();
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - numbers.offsetWidth - 8));
  const below = box.bottom + 8 + numbers.offsetHeight < innerHeight;
  numbers.style.left = `${left + scrollX}px`;
  numbers.style.top = `${(below ? box.bottom + 8 : box.top - 8 - numbers.offsetHeight) + scrollY}px`;
}
