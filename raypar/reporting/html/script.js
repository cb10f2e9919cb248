// What a page adds to its charts: figures at the pointer, other x axes, files of their figures.
"use strict";
const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const made = (tag, inside, text, name) => {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = name || "";
  inside.append(element);
  return element;
};

// --- the tip at the pointer ---
const tip = made("div", document.body, "", "tip");
tip.hidden = true;
all("svg title").forEach((title) => {
  if (title.parentNode.tagName !== "svg") {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
});
const put = (event) => {
  tip.hidden = false;
  const right = event.clientX + 14 + tip.offsetWidth > document.documentElement.clientWidth;
  tip.style.left = `${Math.max(4, right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14)}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
};
document.addEventListener("pointermove", (event) => {
  const found = event.target.closest && event.target.closest("[data-tip]");
  if (found) {
    tip.textContent = found.dataset.tip;
    put(event);
  } else if (!(event.target.closest && event.target.closest(".plot"))) tip.hidden = true;
});

// --- the x axis: steps, what was seen, or time ---
const page = document.querySelector("[data-axes]");
const runs = page ? JSON.parse(page.dataset.axes) : [];
let axis = "step";
const between = (at, from, to) => {
  const last = from.length - 1;
  let low = 0, high = last;
  if (last < 1 || at <= from[0]) return to[0];
  if (at >= from[last]) return to[last];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (from[middle] <= at) low = middle;
    else high = middle;
  }
  return to[low] + ((to[high] - to[low]) * (at - from[low])) / (from[high] - from[low] || 1);
};
const placed = (step, run, name = axis) => {
  const of = runs[run];
  return name === "step" || !of || !of.step || !of.step.length ? step : between(step, of.step, of[name]);
};
const short = (value) => value.toLocaleString("en", { maximumFractionDigits: 2 });
const unitOf = (span, name = axis) =>
  name !== "time" ? ["", 1] : span < 180 ? [" s", 1] : span < 10800 ? [" min", 60] : [" h", 3600];
const spelled = (value, span, name = axis) => {
  const [unit, size] = unitOf(span, name);
  return `${short(name === "time" ? value / size : Math.round(value))}${unit}`;
};
const rounds = (low, high, size) => {
  const rough = (high - low) / 5 / size, power = 10 ** Math.floor(Math.log10(rough || 1));
  const apart = size * ([1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) || 0);
  const found = [];
  for (let at = Math.ceil(low / apart) * apart; apart && at <= high; at += apart) found.push(at);
  return found;
};

class Chart {
  constructor(element) {
    this.element = element;
    this.lines = JSON.parse(element.dataset.lines);
    this.steps = JSON.parse(element.dataset.range);
    this.plot = element.querySelector(".plot");
    this.axis = element.querySelector(".steps");
    this.drawn = all("path", this.plot).map((path) => [path, path.getAttribute("d"), Number(path.dataset.run)]);
    this.marks = all("line[x1]:not([x1='0'])", this.plot).map((line) => [line, Number(line.getAttribute("x1"))]);
    this.signs = all(".sign", this.plot).map((sign) => [sign, 10 * parseFloat(sign.style.left)]);
    this.guide = made("div", this.plot, "", "guide");
    this.guide.hidden = true;
    this.first = this.axis.innerHTML;
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => (this.guide.hidden = tip.hidden = true));
    const save = made("button", this.axis.closest("section") || element, "CSV", "save");
    save.title = "save the figures that are drawn; metrics.jsonl has those of every step";
    save.addEventListener("click", () => this.save());
    this.range = this.steps;
  }
  toStep(x) {
    return this.steps[0] + (x / 1000) * (this.steps[1] - this.steps[0]);
  }
  toX(step, run) {
    const span = this.range[1] - this.range[0];
    return span ? (1000 * (placed(step, run) - this.range[0])) / span : 500;
  }
  redraw() {
    const ends = this.lines.flatMap(({ steps, run }) => [steps[0], steps[steps.length - 1]].map((at) => placed(at, run)));
    this.range = axis === "step" ? this.steps : [Math.min(...ends), Math.max(...ends)];
    const moved = (x, run) => (axis === "step" ? x : this.toX(this.toStep(x), run));
    for (const [path, shape, run] of this.drawn)
      path.setAttribute("d", shape.replace(/([ML])([\d.]+) /g, (_, verb, x) => `${verb}${moved(Number(x), run).toFixed(1)} `));
    for (const [line, x] of this.marks) for (const name of ["x1", "x2"]) line.setAttribute(name, moved(x, 0).toFixed(1));
    for (const [sign, x] of this.signs) sign.style.left = `${moved(x, 0) / 10}%`;
    this.axis.innerHTML = this.first;
    if (axis === "step") return;
    const [low, high] = this.range;
    this.axis.textContent = "";
    for (const at of rounds(low, high, unitOf(high - low)[1]))
      made("span", this.axis, spelled(at, high - low)).style.left = `${(100 * (at - low)) / (high - low || 1)}%`;
    made("b", this.axis, axis === "time" ? "time in steps" : `${runs[0].unit} seen`);
  }
  point(event) {
    const box = this.plot.getBoundingClientRect();
    const at = this.range[0] + ((event.clientX - box.left) / box.width) * (this.range[1] - this.range[0]);
    const shown = this.lines.filter((line) => line.steps.length && !line.hidden).map((line) => {
      const places = line.steps.map((step) => placed(step, line.run));
      const near = places.reduce((best, place, index) => (Math.abs(place - at) < Math.abs(places[best] - at) ? index : best), 0);
      return { line, near };
    });
    if (!shown.length) return;
    const { line, near } = shown.reduce((one, other) =>
      Math.abs(placed(other.line.steps[other.near], other.line.run) - at) <
      Math.abs(placed(one.line.steps[one.near], one.line.run) - at) ? other : one);
    const step = line.steps[near], of = runs[line.run] || {};
    this.guide.hidden = false;
    this.guide.style.left = `${this.toX(step, line.run) / 10}%`;
    tip.textContent = "";
    const seen = !of.step || !of.step.length ? "" : ` · ${spelled(placed(step, line.run, "seen"), 0, "seen")} ${of.unit} · ` +
      spelled(placed(step, line.run, "time"), placed(step, line.run, "time"), "time");
    made("b", tip, `step ${short(step)}${seen}`);
    for (const one of shown) {
      const row = made("div", tip, "", one.line.color);
      made("i", row, "");
      const late = one.line.steps[one.near] === step ? "" : ` (step ${short(one.line.steps[one.near])})`;
      made("span", row, `${one.line.name} ${one.line.texts[one.near]}${late}`);
    }
    put(event);
  }
  save() {
    const quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;
    const rows = new Map();
    this.lines.forEach((line, column) => line.steps.forEach((step, index) => {
      const key = `${step} ${line.run}`;
      if (!rows.has(key)) rows.set(key, [step, placed(step, line.run, "seen"), placed(step, line.run, "time")]);
      rows.get(key)[3 + column] = line.values[index];
    }));
    const title = this.element.closest("section")?.querySelector("h2")?.textContent || "";
    const unit = this.element.dataset.unit ? ` (${this.element.dataset.unit})` : "";
    const seen = [...new Set(this.lines.map(({ run }) => runs[run]?.unit))].filter(Boolean).join(" or ");
    const names = this.lines.map((line) => `${line.name.toLowerCase() === title.toLowerCase() ? "" : `${title}: `}${line.name}${unit}`);
    const head = ["step", `${seen} seen`.trim(), "time in steps (s)", ...names].map(quoted);
    const body = [...rows.values()].sort((one, other) => one[0] - other[0]);
    const text = [head, ...body].map((row) => head.map((_, at) => row[at] ?? "").join(",")).join("\n");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`${text}\n`], { type: "text/csv" }));
    link.download = `${this.element.closest("section")?.id || "chart"}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  }
}
const charts = all("[data-lines]").map((element) => new Chart(element));
const kept = (value) => {
  try {
    if (value) sessionStorage.axis = value; // a page that loads itself again keeps its axis
    return sessionStorage.axis;
  } catch {
    return "step"; // a browser that keeps nothing
  }
};
if (page && charts.length) {
  page.hidden = false;
  all("button", page).forEach((button) => button.addEventListener("click", () => {
    axis = kept(button.value) && button.value;
    all("button", page).forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
    charts.forEach((chart) => chart.redraw());
  }));
  if (kept() && kept() !== "step") all("button", page).find((button) => button.value === kept())?.click();
}
