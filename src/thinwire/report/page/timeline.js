"use strict";
// What happened to runs: resumes, saves, groups that were lost or came.
thinwire.timeline = (() => {
  const { COLOURS, element, heading, note, swatch, words } = thinwire;
  const MARKS = { resume: "▲", lost: "✕", joined: "●", event: "◆" };
  const MOST_LISTED = 6;

  function draw(runs) {
    const section = document.getElementById("timeline");
    const known = runs.filter((run) => run.timeline);
    section.hidden = !known.length;
    if (!known.length) return;
    const phases = [...new Set(known.flatMap((run) => run.timeline.phases.map(([, phase]) => phase)))];
    const tint = (phase) => COLOURS[phases.indexOf(phase) % COLOURS.length];
    const marks = "▲ resumed, ✕ group lost, ● group joined, ◆ other; thin lines are saves.";
    section.replaceChildren(heading("Faults and restarts"), note(`Over the steps of each run. ${marks}`));
    section.append(element("ul", { className: "legend" }, ...phases.map((phase) => element("li", {}, swatch(tint(phase), true), phase))));
    for (const run of known) drawRun(section, run, tint);
  }

  function drawRun(section, run, tint) {
    const { events, saves, phases, end } = run.timeline;
    const last = Math.max(end || 1, ...events.map((event) => event.step), ...saves);
    const at = (step) => (100 * step) / last + "%";
    const bar = element("div", { className: "line-of-time" });
    phases.forEach(([step, phase], i) => {
      const part = element("span", { className: "phase", title: phase });
      Object.assign(part.style, { left: at(step), width: at((i + 1 < phases.length ? phases[i + 1][0] : last) - step), background: tint(phase) });
      bar.append(part);
    });
    saves.forEach((step) => bar.append(mark("save", "", `saved after step ${step.toLocaleString("en")}`, at(step))));
    events.forEach((event) => bar.append(mark(event.kind, MARKS[event.kind], describe(event), at(event.step))));
    section.append(element("div", { className: "bar-row" }, element("span", { textContent: words(run) }), bar, element("span", { textContent: `${last.toLocaleString("en")} steps` })));
    const more = events.length > MOST_LISTED ? [element("li", { textContent: `and ${events.length - MOST_LISTED} more` })] : [];
    section.append(element("ul", { className: "events note" }, ...events.slice(0, MOST_LISTED).map((event) => element("li", { textContent: describe(event) })), ...more));
  }

  const describe = (event) => `step ${event.step.toLocaleString("en")}: ${event.text}`;

  function mark(kind, text, title, left) {
    const made = element("i", { className: `mark ${kind}`, textContent: text, title });
    made.style.left = left;
    return made;
  }

  return { draw };
})();
