"use strict";
// The metric and the loss over steps, bytes and time, and how far groups agree.
thinwire.curves = (() => {
  const { below, colour, compact, dash, digits, draw: chart, element, heading, legend, measured, note, short, size, spreads, words } = thinwire;
  const SMOOTH = 50; // a running mean goes over one part in so many of a curve
  const ACROSS = [
    { field: "step", label: "steps", show: (v) => compact(v), full: (v) => "step " + v.toLocaleString("en") },
    { field: "mb", label: "slow-link bytes per node", show: (v) => size(1e6 * v).replace(".0 ", " "), full: (v) => size(1e6 * v) },
    { field: "s", label: "seconds", show: (v) => compact(v), full: (v) => digits(v, 4) + " s" },
  ];

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

  // From zero; a logarithmic axis begins a little before the run that sent least has ended.
  function range(ends, logarithmic) {
    const known = ends.filter((end) => end > 0);
    return known.length ? [logarithmic ? below(Math.min(...known) / 10) : 0, Math.max(...known) * (logarithmic ? 1.2 : 1)] : undefined;
  }

  // Losses of single steps scatter so much that curves hide each other.
  function smooth(ys) {
    const half = Math.floor(ys.length / SMOOTH / 2);
    return ys.map((y, i) => {
      const near = ys.slice(Math.max(0, i - half), i + half + 1);
      return y === null || near.includes(null) ? y : near.reduce((a, b) => a + b) / near.length;
    });
  }

  function draw(runs) {
    const section = document.getElementById("curves");
    section.replaceChildren();
    for (const metric of [...new Set(runs.map((run) => run.metric))]) {
      const own = runs.filter((run) => run.metric === metric);
      drawKind(section, "metric", measured(metric, own), own, short(metric));
    }
    drawKind(section, "loss", "training loss", runs, (v) => digits(v, 3));
    drawAgreement(section, runs.filter((run) => run.layers.agrees));
  }

  function drawKind(section, kind, name, runs, show) {
    const grid = element("div", { className: "charts" });
    section.append(heading(name[0].toUpperCase() + name.slice(1)), legend([...new Set(runs.map((run) => run.label))]), grid);
    const spiky = kind === "loss" ? runs.filter((run) => run.curves.spikes.y.length) : [];
    if (kind === "loss") {
      const dots = spiky.length ? " Dots: single steps far above those around them." : "";
      grid.before(note(`Running mean over 1/${SMOOTH} of each run.${dots}`));
    }
    const look = (run) => ({ stroke: colour(run.label), dash: dash(run.label) });
    const series = [
      ...runs.map((run) => ({ name: words(run), look: look(run) })),
      ...spiky.map((run) => ({ name: `${words(run)}, a single step`, look: dots(run) })),
    ];
    const all = [...runs.flatMap((run) => run.curves[kind].y), ...spiky.flatMap((run) => run.curves.spikes.y)];
    for (const across of ACROSS) {
      const ends = runs.map((run) => run.curves[kind][across.field].at(-1));
      const x = { ...across, log: across.field === "mb" && spreads(ends) };
      x.range = range(ends, x.log);
      const y = { show, log: kind === "loss" && spreads(all) };
      const tables = [...runs.map((run) => points(run, kind, x.field, x.log)), ...spiky.map((run) => points(run, "spikes", x.field, x.log))];
      chart(grid, `over ${across.label}`, series, tables, x, y);
    }
    if (!grid.children.length) section.append(note("Not recorded."));
  }

  const dots = (run) => ({ stroke: colour(run.label), paths: () => null, points: { show: true, size: 5, fill: colour(run.label), stroke: colour(run.label) } });

  function drawAgreement(section, runs) {
    if (!runs.length) return;
    const noise = Math.max(...runs.map((run) => run.layers.agrees.noise || 0));
    const limit = noise > 1 ? ` and ${digits(noise, 3)} if they move in unrelated directions` : "";
    const grid = element("div", { className: "charts one" });
    const text = `At each average, the length of the groups' changes over that of the mean change: 1 if groups move alike${limit}.`;
    section.append(heading("Divergence of groups"), note(text), legend([...new Set(runs.map((run) => run.label))]), grid);
    const series = runs.map((run) => ({ name: words(run), look: { stroke: colour(run.label), dash: dash(run.label) } }));
    const tables = runs.map((run) => [run.layers.agrees.step, run.layers.agrees.y]);
    const ends = runs.map((run) => run.steps || run.layers.agrees.step.at(-1));
    chart(grid, "", series, tables, { ...ACROSS[0], range: range(ends, false) }, { show: (v) => digits(v, 3) });
  }

  return { ACROSS, draw, range };
})();
