"use strict";
// Layers of one run at a time: ranks, singular values, stability of bases, agreement of groups.
thinwire.layers = (() => {
  const { compact, css, data, digits, draw: chart, element, heading, keep, note, spreads, swatch, words } = thinwire;
  const ROW = 18;
  const LEAST_ROW = 9;
  const SHADES = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis
  const known = data.runs.filter((run) => ["ranks", "stability", "agreement", "spectra"].some((kind) => run.layers[kind]));

  function draw(redraw) {
    const section = document.getElementById("layers");
    section.hidden = !known.length;
    if (!known.length) return;
    const before = section.querySelector("select");
    const choice = element("select", { ariaLabel: "run" }, ...known.map((run, i) => element("option", { value: i, textContent: `${run.name} (${words(run)})` })));
    choice.value = before ? before.value : usual();
    choice.addEventListener("change", redraw);
    section.replaceChildren(heading("Layers"), choice);
    const { ranks, spectra, stability, agreement } = known[choice.value].layers;
    if (ranks) drawRanks(section, ranks);
    if (spectra) drawSpectra(section, spectra);
    if (stability) drawHeat(section, "Stability of bases", stability, "How similar each layer's basis is to that of the comparison before: 1 is the same.");
    if (agreement) drawHeat(section, "Divergence of groups by layer", agreement, "1 where groups moved alike.");
  }

  // The run with most to show.
  function usual() {
    const count = (run) => Object.values(run.layers).filter(Boolean).length;
    return known.reduce((best, run, i) => (count(run) > count(known[best]) ? i : best), 0);
  }

  const tint = (i, count) => `hsl(${count > 1 ? 210 - (180 * i) / (count - 1) : 210} 60% 50%)`;

  function names(section, all, of) {
    if (of > all.length) section.append(note(`${all.length} of ${of} layers, evenly chosen.`));
    if (all.length <= 16) section.append(element("ul", { className: "legend" }, ...all.map((name, i) => element("li", {}, swatch(tint(i, all.length)), name))));
    else section.append(note("From the first layer (blue) to the last."));
  }

  function drawRanks(section, { steps, layers, of, end }) {
    const all = Object.keys(layers);
    const xs = end > steps.at(-1) ? [...steps, end] : steps;
    const tables = all.map((name) => [xs, xs.map((_, i) => layers[name][Math.min(i, steps.length - 1)])]);
    const series = all.map((name, i) => ({ name, look: { stroke: tint(i, all.length), width: 2, paths: uPlot.paths.stepped({ align: 1 }) } }));
    const grid = element("div", { className: "charts one" });
    section.append(element("h3", { textContent: "Ranks" }), grid);
    names(section, all, of);
    const { ACROSS, range } = thinwire.curves;
    chart(grid, "", series, tables, { ...ACROSS[0], range: range([end], false) }, { show: compact, log: spreads(Object.values(layers).flat()) });
  }

  function drawSpectra(section, times) {
    const all = Object.keys(times.at(-1).layers);
    const grid = element("div", { className: "charts" });
    section.append(element("h3", { textContent: "Singular values" }), note("As shares of each layer's largest, over its full rank."), grid);
    names(section, all, times[0].of);
    const smallest = times.flatMap(({ layers }) => Object.values(layers).flat()).filter((value) => value > 1e-6);
    const least = Math.min(...smallest, 0.1);
    const x = { show: (v) => digits(100 * v, 3) + " %", full: (v) => digits(100 * v, 3) + " % of the rank", range: [0, 1] };
    for (const { step, layers } of times) {
      const tables = all.map((name) => {
        const values = layers[name] || [];
        return [values.map((_, i) => i / Math.max(1, values.length - 1)), values.map((value) => (value > 1e-6 ? value : null))];
      });
      const series = all.map((name, i) => ({ name, look: { stroke: tint(i, all.length), spanGaps: false } }));
      chart(grid, `at step ${step.toLocaleString("en")}`, series, tables, x, { show: (v) => digits(v, 2), log: true, range: [least, 1.2] });
    }
  }

  // A heat map: a row per layer, a column per time.
  function drawHeat(section, title, { steps, layers, of }, text) {
    const all = Object.keys(layers);
    const values = all.flatMap((name) => layers[name]).filter((value) => value !== null);
    if (!values.length) return;
    const sorted = [...values].sort((a, b) => a - b);
    const low = sorted[Math.floor(0.01 * sorted.length)]; // one outlier would leave one colour for all others
    const high = sorted.at(-1);
    const readout = element("p", { className: "readout note" });
    const canvas = element("canvas", { className: "heat" });
    const inside = element("div", {}, canvas);
    const more = of > all.length ? ` ${all.length} of ${of} layers, evenly chosen.` : "";
    section.append(element("h3", { textContent: title }), note(text + more), element("div", { className: "chart" }, inside, scale(low, high), readout));
    const tall = all.length > 24 ? LEAST_ROW : ROW;
    keep(inside, (width) => paint(canvas, width, tall, all, steps, layers, low, high));
    canvas.addEventListener("mousemove", (event) => {
      const { left } = frame(canvas.clientWidth);
      const column = Math.floor(((event.offsetX - left) / (canvas.clientWidth - left)) * steps.length);
      const name = all[Math.floor(event.offsetY / tall)];
      const value = name && column >= 0 ? layers[name][column] : null;
      readout.textContent = value === null || value === undefined ? "" : `${name}: ${digits(value, 4)} at step ${steps[column].toLocaleString("en")}`;
    });
  }

  const frame = (width) => ({ left: Math.min(170, Math.round(width / 3)) });

  function paint(canvas, width, tall, all, steps, layers, low, high) {
    const [ratio, height, { left }] = [devicePixelRatio || 1, tall * all.length + 22, frame(width)];
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    Object.assign(canvas.style, { width: width + "px", height: height + "px" });
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const wide = (width - left) / steps.length;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    all.forEach((name, row) => {
      layers[name].forEach((value, column) => {
        pen.fillStyle = value === null ? css("--line") : shade((value - low) / (high - low || 1));
        pen.fillRect(left + column * wide, row * tall, Math.ceil(wide), tall - (tall > LEAST_ROW ? 1 : 0));
      });
      pen.fillStyle = css("--ink");
      if (tall > LEAST_ROW || row % 2 === 0) pen.fillText(fitted(pen, name, left - 8), 0, (row + 0.5) * tall);
    });
    pen.fillStyle = css("--soft");
    pen.fillText(`step ${steps[0].toLocaleString("en")}`, left, height - 9);
    pen.textAlign = "right";
    if (steps.length > 1) pen.fillText(`step ${steps.at(-1).toLocaleString("en")}`, width, height - 9);
  }

  // The end of a name distinguishes layers, not its beginning.
  function fitted(pen, name, width) {
    let text = name;
    while (text.length > 2 && pen.measureText(text).width > width) text = "…" + text.slice(2);
    return text;
  }

  function shade(share) {
    const at = Math.max(0, Math.min(1, share)) * (SHADES.length - 1);
    const [one, other] = [SHADES[Math.floor(at)], SHADES[Math.ceil(at)]];
    return `rgb(${one.map((value, i) => Math.round(value + (other[i] - value) * (at % 1))).join(" ")})`;
  }

  function scale(low, high) {
    const bar = element("span", { className: "scale" });
    bar.style.background = `linear-gradient(to right, ${SHADES.map((rgb) => `rgb(${rgb.join(" ")})`).join(", ")})`;
    return element("p", { className: "note" }, digits(low, 3), bar, digits(high, 3));
  }

  return { draw };
})();
