"use strict";
// Bars: what a run's total is made of, and the time of a step over links of different rates.
thinwire.bars = (() => {
  const { COLOURS, colour, data, digits, duration, element, heading, labels, note, size, swatch, words } = thinwire;
  const VIEWS = [
    { name: "time", field: "seconds", show: (v) => digits(v, 3) + " s", note: "Waiting for a slower worker counts as wire." },
    { name: "bytes by purpose", field: "purposes", show: size, note: "What crossed the slow link, evaluation included." },
    { name: "bytes by phase", field: "phases", show: size, note: "What crossed the slow link, evaluation included." },
    { name: "bytes by link", field: "links", show: size, note: "Inside groups the fast link, between them the slow one." },
  ];
  let chosen = VIEWS[0];

  function draw(runs) {
    const section = document.getElementById("bars");
    const views = VIEWS.filter((view) => runs.some((run) => Object.keys(run[view.field]).length));
    section.hidden = !views.length;
    if (!views.length) return;
    const view = views.includes(chosen) ? chosen : views[0];
    const buttons = views.map((one) => {
      const button = element("button", { type: "button", textContent: one.name, ariaPressed: String(one === view) });
      button.addEventListener("click", () => { chosen = one; draw(runs); });
      return button;
    });
    section.replaceChildren(heading("Where it went"), element("div", { className: "choice" }, ...buttons));
    rows(section, view, runs.filter((run) => Object.keys(run[view.field]).length));
  }

  function rows(section, view, runs) {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run[view.field])))];
    const own = (name) => COLOURS[names.indexOf(name) % COLOURS.length];
    section.append(note(`${view.note} Each bar is the whole of one run.`));
    section.append(element("ul", { className: "legend" }, ...names.map((name) => element("li", {}, swatch(own(name), true), name))));
    for (const run of runs) {
      const parts = Object.entries(run[view.field]);
      const whole = parts.reduce((sum, [, amount]) => sum + amount, 0);
      const bar = element("div", { className: "bar" }, ...parts.map(([name, amount]) =>
        part(amount / whole, own(name), `${name}: ${view.show(amount)}, ${digits((100 * amount) / whole, 3)} %`)));
      const counted = view.field === "links" && run.kernel ? element("small", { textContent: `kernel ${size(run.kernel)}` }) : null;
      section.append(row(words(run), bar, element("span", {}, view.show(whole), counted)));
    }
  }

  function part(share, colour, title) {
    const made = element("span", { title });
    made.style.width = 100 * share + "%";
    made.style.background = colour;
    return made;
  }

  const row = (name, bar, end) => element("div", { className: "bar-row" }, element("span", { textContent: name }), bar, end);

  // Time per step at each rate.

  function drawBenches() {
    const section = document.getElementById("benches");
    section.hidden = !data.benches.length;
    section.replaceChildren(...data.benches.flatMap(bench));
  }

  function bench(found) {
    const own = [...new Set(found.rates.flatMap((at) => at.methods.map((method) => method.label)))];
    const tint = (label) => (labels.includes(label) ? colour(label) : COLOURS[own.indexOf(label) % COLOURS.length]);
    const title = `Time per step: ${found.recipe}, ${found.hosts} hosts, ${found.workers} workers`;
    const text = "Pale: waiting for the wire. The line is what was planned. Bars of one rate are to scale.";
    return [heading(title), note(text), ...found.rates.flatMap((at) => {
      const slowest = Math.max(...at.methods.map((method) => Math.max(method.step_s, method.planned_s)));
      const over = at.rate === "unshaped" ? "unshaped links" : at.rate;
      return [element("h3", { textContent: `${over} (${at.probe} measured)` }), ...at.methods.map((method) => benchRow(method, slowest, tint(method.label)))];
    })];
  }

  function benchRow(method, slowest, tint) {
    const waiting = part((method.step_s * (method.wire || 0)) / slowest, tint, `waiting for the wire: ${digits(100 * (method.wire || 0), 3)} %`);
    waiting.style.opacity = 0.45;
    const planned = element("i", { className: "planned", title: `planned: ${duration(method.planned_s)}` });
    planned.style.left = (100 * method.planned_s) / slowest + "%";
    const bar = element("div", { className: "bar bench" }, part((method.step_s * (1 - (method.wire || 0))) / slowest, tint, "computing and all else"), waiting, planned);
    const faster = method.speedup === null ? "" : `${digits(method.speedup, 2)} ×`;
    return row(method.label, bar, element("span", {}, duration(method.step_s), faster ? element("small", { textContent: faster }) : null));
  }

  return { draw, drawBenches };
})();
