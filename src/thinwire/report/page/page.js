"use strict";
// The report: a table of runs, and charts of those that pass its filter.
(() => {
  const { compact, dashed, digits, draw, element, figure, size, swatch } = thinwire;
  const data = JSON.parse(document.getElementById("data").textContent);
  const COLOURS = ["#4878cf", "#e07b39", "#3f9b63", "#cc4c56", "#8a6fc4", "#94714f", "#cf6fae", "#858d94", "#b29a2e"];
  const DASHES = [[], [8, 4], [2, 4], [10, 4, 2, 4]];
  const MOST_SHOWN = 20; // more curves cannot be distinguished
  const SMOOTH = 50; // a running mean goes over one part in so many of a curve
  const SPREAD = 20; // ratio from which an axis is logarithmic
  const labels = [...new Set(data.runs.map((run) => run.label))];
  const metrics = [...new Set(data.runs.map((run) => run.metric))];
  const severalRecipes = new Set(data.runs.map((run) => run.recipe)).size > 1;
  let shown = data.runs;
  let sorted = { column: null, down: false };

  const colour = (label) => COLOURS[labels.indexOf(label) % COLOURS.length];
  const dash = (label) => DASHES[Math.floor(labels.indexOf(label) / COLOURS.length) % DASHES.length];
  const words = (run) => run.label + ", seed " + run.seed;

  // The table.

  const COLUMNS = [
    { name: "run", of: (run) => run.name, text: (run) => run.name },
    ...(severalRecipes ? [{ name: "recipe", of: (run) => run.recipe, text: (run) => run.recipe }] : []),
    { name: "method", of: (run) => run.label, text: (run) => run.label },
    {
      name: metrics.length === 1 ? metrics[0] : "result",
      of: (run) => run.result,
      text: (run) => (metrics.length === 1 ? "" : run.metric + " ") + figure(run.metric, run.result),
      number: true,
    },
    { name: "slow link", of: (run) => run.bytes, text: (run) => size(run.bytes), number: true },
    { name: "of all-reduce", of: (run) => run.share, text: (run) => dashed(run.share, (v) => digits(100 * v, 3) + " %"), number: true },
    { name: "model", of: (run) => run.compression, text: (run) => dashed(run.compression, (v) => v.toFixed(2) + " : 1"), number: true },
    { name: "time", of: (run) => run.wall_s, text: (run) => dashed(run.wall_s, (v) => digits(v, 3) + " s"), number: true },
    { name: "seed", of: (run) => run.seed, text: (run) => String(run.seed), number: true },
    { name: "workers", of: (run) => run.world_size, text: (run) => dashed(run.world_size, String), number: true },
    { name: "steps", of: (run) => run.steps, text: (run) => dashed(run.steps, (v) => v.toLocaleString("en")), number: true },
  ];

  function drawHead() {
    const row = element("tr");
    for (const column of COLUMNS) {
      const button = element("button", { type: "button", textContent: column.name });
      button.addEventListener("click", () => {
        sorted = { column, down: sorted.column === column && !sorted.down };
        update();
      });
      const cell = element("th", { scope: "col", className: column.number ? "number" : "" }, button);
      if (sorted.column === column) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      row.append(cell);
    }
    document.querySelector("#runs thead").replaceChildren(row);
  }

  function compareBy(column) {
    return (a, b) => {
      const [one, other] = [column.of(a), column.of(b)];
      if (one === null || other === null) return (one === null) - (other === null); // unknown ones last
      return column.number ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
    };
  }

  function drawRows() {
    const rows = shown.map((run) =>
      element("tr", {}, ...COLUMNS.map((column, place) =>
        element("td", { className: column.number ? "number" : "text" }, place ? null : swatch(colour(run.label)), column.text(run)))));
    document.querySelector("#runs tbody").replaceChildren(...rows);
    const all = data.runs.length;
    const limit = shown.length > MOST_SHOWN ? `; charts show the first ${MOST_SHOWN} of the table` : "";
    document.getElementById("count").textContent = `${shown.length} of ${all} runs${limit}`;
  }

  // Curves.

  function points(run, kind, across, logarithmic) {
    const curve = run.curves[kind];
    const found = new Map(); // of several values at the same place, the last
    curve[across].forEach((x, i) => {
      if (x !== null && (!logarithmic || x > 0)) found.set(x, curve.y[i]);
    });
    const xs = [...found.keys()].sort((a, b) => a - b);
    const ys = xs.map((x) => found.get(x));
    return [xs, kind === "loss" ? smooth(ys) : ys];
  }

  function spreads(values) {
    const known = values.filter((value) => value !== null && value !== undefined);
    const least = Math.min(...known);
    return known.length > 1 && least > 0 && Math.max(...known) > SPREAD * least;
  }

  // From zero; a logarithmic axis begins a little before the run that sent least has ended.
  function range(ends, logarithmic) {
    const known = ends.filter((end) => end > 0);
    return known.length ? [logarithmic ? Math.min(...known) / 10 : 0, Math.max(...known) * (logarithmic ? 1.2 : 1)] : undefined;
  }

  // Losses of single steps scatter so much that curves hide each other.
  function smooth(ys) {
    const half = Math.floor(ys.length / SMOOTH / 2);
    return ys.map((y, i) => {
      const near = ys.slice(Math.max(0, i - half), i + half + 1);
      return y === null || near.includes(null) ? y : near.reduce((a, b) => a + b) / near.length;
    });
  }

  const ACROSS = [
    { field: "step", label: "steps", show: (v) => compact(v), full: (v) => "step " + v.toLocaleString("en") },
    { field: "mb", label: "slow-link bytes per node", show: (v) => size(1e6 * v).replace(".0 ", " "), full: (v) => size(1e6 * v) },
    { field: "s", label: "seconds", show: (v) => compact(v), full: (v) => digits(v, 4) + " s" },
  ];

  function drawCurves(runs) {
    const section = document.getElementById("curves");
    section.replaceChildren();
    for (const metric of [...new Set(runs.map((run) => run.metric))]) {
      const own = runs.filter((run) => run.metric === metric);
      const show = metric === "accuracy" ? (v) => digits(100 * v, 4) + " %" : (v) => digits(v, 4);
      drawKind(section, "metric", metric, own, show);
    }
    drawKind(section, "loss", "training loss", runs, (v) => digits(v, 3));
  }

  function drawKind(section, kind, name, runs, show) {
    const grid = element("div", { className: "charts" });
    const heading = element("h2", { textContent: name[0].toUpperCase() + name.slice(1) });
    section.append(heading, legend(runs), grid);
    if (kind === "loss") heading.after(element("p", { className: "note", textContent: `Running mean over 1/${SMOOTH} of each run.` }));
    const series = runs.map((run) => ({ name: words(run), look: { stroke: colour(run.label), dash: dash(run.label) } }));
    const all = runs.flatMap((run) => run.curves[kind].y);
    for (const across of ACROSS) {
      const ends = runs.map((run) => run.curves[kind][across.field].at(-1));
      const x = { ...across, log: across.field === "mb" && spreads(ends) };
      x.range = range(ends, x.log);
      const y = { show, log: kind === "loss" && spreads(all) };
      draw(grid, `over ${across.label}`, series, runs.map((run) => points(run, kind, x.field, x.log)), x, y);
    }
    if (!grid.children.length) section.append(element("p", { className: "note", textContent: "Not recorded." }));
  }

  function legend(runs) {
    const seen = [...new Set(runs.map((run) => run.label))];
    return element("ul", { className: "legend" }, ...seen.map((label) => {
      const line = swatch(colour(label));
      if (dash(label).length) line.style.borderTopStyle = "dashed";
      return element("li", {}, line, label);
    }));
  }

  // Bars: what a run's total is made of.

  function drawBars(runs) {
    const section = document.getElementById("bars");
    section.replaceChildren();
    bars(section, "Bytes by purpose", runs, "purposes", size, "What crossed the slow link, evaluation included. Each bar is the whole of one run.");
    bars(section, "Bytes by phase", runs, "phases", size, "");
    bars(section, "Time", runs, "seconds", (v) => digits(v, 3) + " s", "What the time of training was spent on.");
  }

  function bars(section, title, runs, field, show, note) {
    const known = runs.filter((run) => Object.keys(run[field]).length);
    if (!known.length) return;
    const names = [...new Set(known.flatMap((run) => Object.keys(run[field])))];
    const own = (name) => COLOURS[names.indexOf(name) % COLOURS.length];
    section.append(element("h2", { textContent: title }), element("p", { className: "note", textContent: note }));
    section.append(element("ul", { className: "legend" }, ...names.map((name) => element("li", {}, swatch(own(name), true), name))));
    for (const run of known) {
      const whole = Object.values(run[field]).reduce((a, b) => a + b, 0);
      const bar = element("div", { className: "bar" }, ...Object.entries(run[field]).map(([name, amount]) => {
        const part = element("span", { title: `${name}: ${show(amount)}, ${digits((100 * amount) / whole, 3)} %` });
        part.style.width = (100 * amount) / whole + "%";
        part.style.background = own(name);
        return part;
      }));
      section.append(element("div", { className: "bar-row" }, element("span", { textContent: words(run) }), bar, element("span", { textContent: show(whole) })));
    }
  }

  // Ranks of one run at a time.

  function drawRanks() {
    const section = document.getElementById("ranks");
    const known = data.runs.filter((run) => run.ranks);
    section.hidden = !known.length;
    if (!known.length) return;
    const before = section.querySelector("select");
    const place = element("select", { ariaLabel: "run" }, ...known.map((run, i) => element("option", { value: i, textContent: `${run.name} (${words(run)})` })));
    place.value = before ? before.value : 0;
    place.addEventListener("change", redraw);
    const run = known[place.value];
    const { steps, layers, of, end } = run.ranks;
    const names = Object.keys(layers);
    const tint = (i) => `hsl(${names.length > 1 ? 210 - (180 * i) / (names.length - 1) : 210} 60% 50%)`;
    const xs = end > steps.at(-1) ? [...steps, end] : steps;
    const tables = names.map((name) => [xs, xs.map((_, i) => layers[name][Math.min(i, steps.length - 1)])]);
    const series = names.map((name, i) => ({ name, look: { stroke: tint(i), width: 2, paths: uPlot.paths.stepped({ align: 1 }) } }));
    const grid = element("div", { className: "charts" });
    const note = of > names.length ? `${names.length} of ${of} layers, evenly chosen.` : "From the first layer (blue) to the last.";
    section.replaceChildren(element("h2", { textContent: "Ranks per layer" }), place, element("p", { className: "note", textContent: note }), grid);
    if (names.length <= 16) section.append(element("ul", { className: "legend" }, ...names.map((name, i) => element("li", {}, swatch(tint(i)), name))));
    draw(grid, "over steps", series, tables, { ...ACROSS[0], range: range([end], false) }, { show: compact, log: spreads(Object.values(layers).flat()) });
  }

  // Settings and commands, built when they are opened: there may be hundreds.

  function drawDetails() {
    document.getElementById("details").replaceChildren(...data.runs.map((run) => {
      const made = element("details", {}, element("summary", { textContent: `${run.name}: ${words(run)}` }));
      made.addEventListener("toggle", () => { if (made.open && made.children.length === 1) fill(made, run); });
      return made;
    }));
  }

  function fill(made, run) {
    const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
    const about = { recipe: run.recipe, optimizer: run.optimizer, lr: run.lr, ...run.config, ...(run.versions || {}) };
    const rows = Object.entries(about).map(([name, value]) =>
      element("tr", {}, element("td", { textContent: name }), element("td", { className: "text", textContent: text(value) })));
    made.append(element("pre", { textContent: run.command }), element("table", {}, element("tbody", {}, ...rows)));
  }

  // All of it.

  function redraw() {
    thinwire.forget();
    const runs = shown.slice(0, MOST_SHOWN);
    drawCurves(runs);
    drawBars(runs);
    drawRanks();
    thinwire.fit();
  }

  function update() {
    const wanted = document.getElementById("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const about = (run) => `${run.name} ${run.recipe} ${words(run)} ${run.command}`.toLowerCase();
    shown = data.runs.filter((run) => wanted.every((word) => about(run).includes(word)));
    if (sorted.column) {
      shown.sort(compareBy(sorted.column));
      if (sorted.down) shown.reverse();
    }
    drawHead();
    drawRows();
    redraw();
  }

  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone hides its address bar while scrolling
    width = innerWidth;
    thinwire.fit();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.getElementById("filter").addEventListener("input", update);
  drawDetails();
  update();
})();
