/* ---- curves ---- */

const PANELS = [
  ["Turn success", ["turn_success"]],
  ["Session success", ["session_success"]],
  ["Reward", ["reward"]],
  ["Turn success, turn by turn", /^turn_success\/turn_\d+$/],
  ["Loss", ["loss"]],
  ["Entropy (nats)", ["entropy"]],
  ["Share of the credit on its largest tokens", ["credit_top_1", "credit_top_5", "credit_top_10"]],
  ["Share of the tokens", ["clipped", "share_amplified", "sign_flipped"]],
  ["Teacher gap (nats)", ["teacher_gap"]],
];

function curves() {
  const keys = [
    ...new Set(run.metrics.flatMap((line) => Object.keys(line).filter((key) => typeof line[key] === "number"))),
  ].filter((key) => key !== "step");
  const panels = PANELS.map(([title, wanted]) => [
    title,
    keys.filter((key) => (wanted instanceof RegExp ? wanted.test(key) : wanted.includes(key))),
  ]).filter(([, found]) => found.length);
  if (!panels.length)
    return element("p", { class: "empty" }, "No step has been logged yet: metrics.jsonl holds no numbers to draw.");
  const drawn = new Set(panels.flatMap(([, found]) => found));
  const others = {};
  for (const key of keys.filter((key) => !drawn.has(key)))
    (others[key.replace(/\/turn_\d+$/, " by turn")] ??= []).push(key);
  const more = element(
    "details",
    {
      ontoggle: () =>
        more.children.length > 1 ||
        more.append(
          element("div", { class: "curves" }, ...Object.entries(others).map(([title, found]) => curve(title, found))),
        ),
    },
    element("summary", {}, `All other numbers of metrics.jsonl (${Object.keys(others).length})`),
  );
  return element(
    "div",
    {},
    element("div", { class: "curves" }, ...panels.map(([title, found]) => curve(title, found))),
    element("p", {}, more),
  );
}

/** Points of every key: a line of the sampled sessions, and one, dashed, of the held-out evaluations. */
function seriesOf(keys) {
  const several = keys.length > 1;
  return keys
    .flatMap((key, place) =>
      ["step", "evaluation"].map((event) => {
        const points = run.metrics
          .filter((line) => line.event === event && typeof line[key] === "number")
          .map((line) => [line.step, line[key]]);
        const name = several
          ? key.replace(/.*\/turn_/, "turn ").replaceAll("_", " ")
          : event === "step"
            ? "sampled"
            : "held out";
        const hue =
          keys.length > HUES.length
            ? `color-mix(in oklch, ${HUES[0]}, ${HUES[1]} ${Math.round((100 * place) / (keys.length - 1))}%)`
            : HUES[several ? place : event === "step" ? 0 : 1];
        return {
          name: several && event === "evaluation" ? `${name}, held out` : name,
          points,
          hue,
          held: event === "evaluation",
        };
      }),
    )
    .filter((series) => series.points.length);
}

function curve(title, keys) {
  const [width, height, left, right, low, high] = [340, 170, 44, 8, 20, 8];
  const series = seriesOf(keys);
  if (!series.length)
    return element(
      "figure",
      { class: "curve" },
      element("h3", {}, title),
      element("p", { class: "soft" }, "logged before the first step alone"),
    );
  const steps = [...new Set(series.flatMap(({ points }) => points.map(([step]) => step)))].sort((a, b) => a - b);
  const values = series.flatMap(({ points }) => points.map(([, value]) => value)).filter(Number.isFinite);
  const ticks = ticksOf(Math.min(...values), Math.max(...values));
  const [from, to] = [Math.min(ticks[0], ...values), Math.max(ticks.at(-1), ...values)];
  const x = (step) => left + ((width - left - right) * (step - steps[0])) / (steps.at(-1) - steps[0] || 1);
  const y = (value) => height - low - ((height - low - high) * (value - from)) / (to - from || 1);
  const svg = element("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    tabindex: 0,
    "aria-label": `${title}, steps ${steps[0]} to ${steps.at(-1)}; arrow keys go from step to step`,
  });
  for (const tick of ticks) {
    svg.append(element("line", { class: "rule", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    svg.append(element("text", { x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, shown(tick)));
  }
  for (const step of ticksOf(steps[0], steps.at(-1)).filter(
    (step) => Number.isInteger(step) && step >= steps[0] && step <= steps.at(-1),
  ))
    svg.append(element("text", { x: x(step), y: height - 5, "text-anchor": "middle" }, `${step}`));
  for (const { points, hue, held } of series) {
    svg.append(
      element("path", {
        class: held ? "path held" : "path",
        stroke: hue,
        d: `M${points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join("L")}`,
      }),
    );
    if (held || points.length < 3)
      svg.append(...points.map(([step, value]) => element("circle", { cx: x(step), cy: y(value), r: 2.6, fill: hue })));
  }
  const cursor = element("line", { class: "cursor", y1: high, y2: height - low, visibility: "hidden" });
  svg.append(cursor);
  const legend = element("ul", { class: "legend" });
  const at = element("span", { class: "soft" });
  let place = steps.length - 1;
  const show = (next) => {
    place = Math.max(0, Math.min(steps.length - 1, next));
    cursor.setAttribute("x1", x(steps[place]));
    cursor.setAttribute("x2", x(steps[place]));
    at.textContent = `step ${steps[place]}`;
    legend.replaceChildren(
      ...series.map(({ name, points, hue, held }) => {
        const point = points.findLast(([step]) => step <= steps[place]);
        const sample = element(
          "svg",
          { viewBox: "0 0 18 8", "aria-hidden": "true" },
          element("path", { class: held ? "path held" : "path", stroke: hue, d: "M0,4L18,4" }),
        );
        return element("li", {}, sample, `${name} `, element("b", {}, shown(point?.[1])));
      }),
    );
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = ((event.clientX - box.left) / box.width) * width;
    return steps.reduce(
      (best, step, i) => (Math.abs(x(step) - wanted) < Math.abs(x(steps[best]) - wanted) ? i : best),
      0,
    );
  };
  const point = (visibility) => cursor.setAttribute("visibility", visibility);
  svg.addEventListener("pointermove", (event) => (point("visible"), show(nearest(event))));
  svg.addEventListener("pointerleave", () => (point("hidden"), show(steps.length - 1)));
  svg.addEventListener("focus", () => point("visible"));
  svg.addEventListener("blur", () => point("hidden"));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move) (event.preventDefault(), show(place + move));
  });
  show(place);
  return element(
    "figure",
    { class: "curve" },
    element("div", { class: "top" }, element("h3", {}, title), at),
    svg,
    legend,
  );
}

/** Three to six round numbers about the range. */
function ticksOf(low, high) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / 3));
  const step = power * [1, 2, 5, 10].find((factor) => span / (factor * power) <= 5);
  const first = Math.floor(low / step + 1e-9);
  const count = Math.max(1, Math.ceil(high / step - 1e-9) - first);
  return Array.from({ length: count + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
