// The memory calculator: plain JavaScript, no network. The figures are in memory-calculator-data.js.
(() => {
  "use strict";
  const DATA = window.retrogradeMemory;
  const MODES = Object.keys(DATA.modes);
  const GIB = 2 ** 30;
  const UNITS = [["TiB", 2 ** 40], ["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const root = document.getElementById("calculator");

  // The formula: elements per block and per stack, in the units of the data file.

  function unitsOf({ width, length, batch }) {
    const tokens = batch * length;
    return { stream: tokens * width, head: tokens * (width / DATA.head_width), token: tokens, matrix: width * width, width };
  }

  function elements(counts, units) {
    return Object.entries(counts).reduce((sum, [unit, count]) => sum + count * units[unit], 0);
  }

  function costs(mode, sizes, withState) {
    const units = unitsOf(sizes);
    const state = withState ? DATA.copies_of_parameters * elements(DATA.parameters, units) : 0;
    return {
      block: DATA.bytes_per_element * (elements(DATA.modes[mode].block, units) + state),
      stack: DATA.bytes_per_element * elements(DATA.modes[mode].stack, units),
    };
  }

  function peak(mode, sizes, withState) {
    const { block, stack } = costs(mode, sizes, withState);
    return block * sizes.depth + stack;
  }

  function deepest(mode, sizes, withState, budget) {
    const { block, stack } = costs(mode, sizes, withState);
    if (block === 0) return stack <= budget ? Infinity : 0;
    return Math.max(0, Math.floor((budget - stack) / block));
  }

  function formatBytes(bytes) {
    const [unit, size] = UNITS.find(([, each]) => bytes >= each) || UNITS[UNITS.length - 1];
    const value = bytes / size;
    return `${value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3))} ${unit}`;
  }

  function formatDepth(depth) {
    if (depth === Infinity) return "any";
    return depth < 2 ? "none" : depth.toLocaleString("en");
  }

  // The inputs: a slider on a logarithmic scale beside a number, which is what counts.

  const INPUTS = {
    depth: { label: "Depth", unit: "blocks", value: 48, from: 2, to: 1024, step: 1 },
    width: { label: "Width", unit: "features", value: 1024, from: 128, to: 8192, step: DATA.head_width },
    length: { label: "Length", unit: "tokens", value: 1024, from: 16, to: 131072, step: 1 },
    batch: { label: "Batch", unit: "sequences", value: 8, from: 1, to: 512, step: 1 },
    budget: { label: "Budget", unit: "GiB", value: 24, from: 1, to: 192, step: 1 },
  };
  const fields = {};

  function make(name, attributes, ...children) {
    const svg = ["svg", "line", "polyline", "circle", "text", "g"].includes(name);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function rounded(spec, value) {
    const step = Math.round((value - spec.from) / spec.step) * spec.step + spec.from;
    return Math.min(spec.to, Math.max(spec.from, step));
  }

  function typed(number, spec) {
    return number.value === "" ? spec.value : Number(number.value);
  }

  function addField(form, name) {
    const spec = INPUTS[name];
    const id = `calculator-${name}`;
    const slider = make("input", {
      type: "range", min: Math.log2(spec.from), max: Math.log2(spec.to), step: 0.0625, "aria-label": `${spec.label}, ${spec.unit}`,
      "data-slider": name,
    });
    const number = make("input", { type: "number", id, min: spec.from, max: spec.to, step: spec.step, inputmode: "numeric" });
    const show = (value) => {
      slider.value = Math.log2(value);
      slider.setAttribute("aria-valuetext", `${value} ${spec.unit}`);
    };
    number.value = spec.value;
    show(spec.value);
    slider.addEventListener("input", () => {
      number.value = rounded(spec, 2 ** Number(slider.value));
      slider.setAttribute("aria-valuetext", `${number.value} ${spec.unit}`);
      update();
    });
    number.addEventListener("input", () => {
      if (Number(number.value) >= spec.from) show(Number(number.value));
      update();
    });
    number.addEventListener("change", () => {
      number.value = rounded(spec, typed(number, spec));
      show(Number(number.value));
      update();
    });
    fields[name] = { spec, number };
    form.append(make("label", { for: id }, spec.label, make("small", {}, spec.unit)), slider, number);
  }

  function read() {
    const values = {};
    for (const [name, { spec, number }] of Object.entries(fields)) {
      values[name] = Math.min(spec.to, Math.max(spec.from, typed(number, spec)));
    }
    return values;
  }

  // The results: one row with a bar per mode, and peak memory over depth.

  const rows = {};

  function addRow(table, mode) {
    const bar = make("i", { style: `background: ${DATA.modes[mode].colour}` });
    const bytes = make("output", { "data-mode": mode });
    const depth = make("td", { "data-deepest": mode });
    rows[mode] = { bar, bytes, depth };
    const name = make("th", { scope: "row" }, make("code", {}, mode));
    table.append(make("tr", {}, name, make("td", {}, make("span", { class: "bar" }, bar), bytes), depth));
  }

  function updateRows(sizes, withState, budget) {
    const peaks = MODES.map((mode) => peak(mode, sizes, withState));
    MODES.forEach((mode, i) => {
      rows[mode].bar.style.width = `${(100 * peaks[i]) / Math.max(...peaks)}%`;
      rows[mode].bytes.textContent = formatBytes(peaks[i]);
      rows[mode].bytes.dataset.bytes = peaks[i];
      rows[mode].depth.textContent = formatDepth(deepest(mode, sizes, withState, budget));
    });
  }

  function niceStep(most) {
    const power = 10 ** Math.floor(Math.log10(most / 4));
    return [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= most / 4);
  }

  const BOX = { width: 640, height: 340, left: 64, right: 124, top: 26, bottom: 46 };

  function scales(depths, most) {
    const { width, height, left, right, top, bottom } = BOX;
    return {
      x: (depth) => left + ((width - left - right) * depth) / depths,
      y: (bytes) => height - bottom - ((height - top - bottom) * bytes) / most,
    };
  }

  function axes(depths, most, { x, y }) {
    const parts = [];
    const [unit, size] = UNITS.find(([, each]) => most >= each) || UNITS[UNITS.length - 1];
    const step = niceStep(most / size);
    for (let value = 0; value * size <= most * 1.001; value += step) {
      const at = y(value * size);
      parts.push(make("line", { x1: x(0), x2: x(depths), y1: at, y2: at, class: "grid" }));
      parts.push(make("text", { x: x(0) - 8, y: at + 4, "text-anchor": "end" }, String(Number(value.toPrecision(3)))));
    }
    for (let i = 0; i <= 4; i += 1) {
      const depth = (depths * i) / 4;
      parts.push(make("text", { x: x(depth), y: y(0) + 18, "text-anchor": "middle" }, depth.toLocaleString("en")));
    }
    parts.push(make("text", { x: x(depths / 2), y: BOX.height - 6, "text-anchor": "middle" }, "depth, blocks"));
    parts.push(make("text", { x: 4, y: 14 }, `peak memory, ${unit}`));
    return parts;
  }

  function labels(ends, { x }, depths) {
    const sorted = [...ends].sort((a, b) => b.at - a.at);
    let below = Infinity;
    return sorted.map(({ mode, at }) => {
      below = Math.min(at + 4, below - 16);
      return make("text", { x: x(depths) + 8, y: below, class: "name" }, mode);
    });
  }

  function drawChart(svg, sizes, withState, budget) {
    const depths = Math.max(16, 2 ** Math.ceil(Math.log2(1.25 * sizes.depth)));
    const at = (mode, depth) => peak(mode, { ...sizes, depth }, withState);
    const most = 1.04 * Math.max(...MODES.map((mode) => at(mode, depths)));
    const scale = scales(depths, most);
    const parts = axes(depths, most, scale);
    if (budget <= most) {
      const level = scale.y(budget);
      parts.push(make("line", { x1: scale.x(0), x2: scale.x(depths), y1: level, y2: level, class: "budget" }));
      parts.push(make("text", { x: scale.x(0) + 6, y: level - 6 }, "budget"));
    }
    for (const mode of MODES) {
      const { colour } = DATA.modes[mode];
      const points = [2, depths].map((depth) => `${scale.x(depth)},${scale.y(at(mode, depth))}`).join(" ");
      parts.push(make("polyline", { points, stroke: colour, fill: "none", "stroke-width": 3 }));
      parts.push(make("circle", { cx: scale.x(sizes.depth), cy: scale.y(at(mode, sizes.depth)), r: 6, fill: colour }));
    }
    parts.push(...labels(MODES.map((mode) => ({ mode, at: scale.y(at(mode, depths)) })), scale, depths));
    svg.replaceChildren(...parts);
    svg.setAttribute("aria-label", `Predicted peak memory over depth up to ${depths} blocks, for ${MODES.join(", ")}`);
  }

  // The page.

  const form = make("form", { class: "inputs", autocomplete: "off" });
  form.addEventListener("submit", (event) => event.preventDefault());
  Object.keys(INPUTS).forEach((name) => addField(form, name));
  const state = make("input", { type: "checkbox", id: "calculator-state" });
  form.append(make("label", { class: "switch" }, state, "Add parameters, gradients and AdamW's state"));
  state.addEventListener("change", update);

  const head = ["memory", "predicted peak", "deepest that fits"].map((text) => make("th", { scope: "col" }, text));
  const body = make("tbody", {});
  MODES.forEach((mode) => addRow(body, mode));
  const table = make("table", { class: "results" }, make("thead", {}, make("tr", {}, ...head)), body);
  const chart = make("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img" });

  function update() {
    const { budget, ...sizes } = read();
    updateRows(sizes, state.checked, budget * GIB);
    drawChart(chart, sizes, state.checked, budget * GIB);
  }

  root.replaceChildren(form, table, chart);
  update();
})();
