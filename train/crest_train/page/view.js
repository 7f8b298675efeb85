"use strict";
/* The page of a run. Text of the run reaches the document as text nodes alone, never as markup.

   All scripts share this scope: here are the helpers, the addresses and the start; tokens.js has what colours a token and
   tells its numbers, curves.js, sessions.js (the table) and session.js the three things to look at.
   run: what view.page_data gives. run.rows: a summary of each session, which the table shows, sorts and filters.
   Addresses: "#" the overview, "#3" the fourth session of run.sessions, "#3+" the same beside its siblings. */

const SVG = "http://www.w3.org/2000/svg";
const HUES = [
  "light-dark(#0072b2, #56b4e9)",
  "light-dark(#c65500, #f0a35c)",
  "light-dark(#00795a, #3fc79a)",
  "light-dark(#a04a86, #dd93c2)",
];
const PAGE_ROWS = 50;
const LONG_TEXT = 3000;
const main = document.getElementById("main");
const numbers = document.getElementById("numbers");
const state = { measure: "credit", sort: "step", down: true, filters: {}, search: "", page: 0 };
let run;

/* ---- elements and numbers ---- */

function element(name, attributes = {}, ...children) {
  const made = SHAPES.has(name) ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}
const SHAPES = new Set(["svg", "path", "line", "circle", "text"]);

/** A number with up to four digits, its sign where it is a difference. */
function shown(value, signed = false) {
  if (value === undefined || value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const digits =
    size !== 0 && (size >= 1e5 || size < 1e-3)
      ? value.toExponential(1)
      : size >= 100
        ? value.toFixed(0)
        : value.toFixed(3);
  const short = digits.includes("e") ? digits : digits.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
  return (signed && value > 0 ? "+" : "") + short.replace("-", "−");
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Control characters as their pictures (ESC: ␛), so that what a tool wrote is seen and nothing is obeyed. */
const visible = (text) =>
  text.replace(/[\x00-\x08\x0b-\x1f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0))).replace(/\x7f/g, "␡");

/* ---- light and dark, addresses, start ---- */

function theme() {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () =>
    (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const label = () => (button.textContent = dark() ? "Light" : "Dark");
  button.addEventListener("click", () => ((root.style.colorScheme = dark() ? "light" : "dark"), label()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();
}

function overview() {
  return element(
    "div",
    {},
    element("h2", {}, "Curves"),
    curves(),
    element("h2", {}, "Sessions"),
    table(),
    element("details", {}, element("summary", {}, "Configuration"), element("pre", {}, run.config)),
  );
}

const seen = { scroll: 0, index: null };

function route() {
  const [, index, side] = location.hash.match(/^#(\d+)(\+?)$/) ?? [];
  const opened = run.sessions[index] ? index : null;
  if (seen.index === null && opened !== null) seen.scroll = scrollY;
  point(null);
  main.replaceChildren(opened === null ? overview() : sessionPage(Number(index), side === "+"));
  const stayed = opened !== null && seen.index === opened;
  main.focus({ preventScroll: true });
  if (!stayed) scrollTo(0, opened === null ? seen.scroll : 0);
  seen.index = opened;
}

async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (c) => c.charCodeAt(0));
  const read = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  const whole = (action) => ({ info: {}, text: "", ...action });
  read.sessions = read.sessions.map((session) => ({
    seed: 0,
    system: "",
    requests: [],
    texts: [],
    ...session,
    actions: session.actions.map(whole),
  }));
  read.rows = read.sessions.map(summary);
  return read;
}

unpack().then(
  (read) => {
    run = read;
    const done = Math.max(0, ...run.metrics.filter((line) => line.event === "step").map((line) => line.step));
    document.getElementById("facts").textContent = `${run.run}: policy ${run.policy}, ${done} of ${run.steps} steps`;
    theme();
    addEventListener("hashchange", route);
    route();
  },
  (error) =>
    main.replaceChildren(
      element(
        "p",
        { class: "empty" },
        `The page's data could not be unpacked (${error.message}); it needs a browser of 2024 or later.`,
      ),
    ),
);
