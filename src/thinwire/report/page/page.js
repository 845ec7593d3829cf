"use strict";
// The report: a table of runs, and charts of those that pass its filter.
(() => {
  const { colour, dashed, data, digits, element, figure, measured, size, swatch, words } = thinwire;
  const MOST_SHOWN = 20; // more curves cannot be distinguished
  const metrics = [...new Set(data.runs.map((run) => run.metric))];
  const severalRecipes = new Set(data.runs.map((run) => run.recipe)).size > 1;
  // Which run of all-reduce a share is of, where that is not the one beside it for all.
  const folder = (name) => name.split("/").slice(0, -1).join("/");
  const elsewhere = data.runs.some((run) => run.against === null || folder(run.against) !== folder(run.name));
  let shown = data.runs;
  let sorted = { column: null, down: false };

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
    ...(elsewhere ? [{ name: "against", of: (run) => run.against, text: (run) => run.against || "an estimate" }] : []),
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
      element("tr", {}, ...COLUMNS.map((column, place) => {
        const value = element("span", {}, place ? null : swatch(colour(run.label)), column.text(run));
        const cell = element("td", { className: column.number ? "number" : "text" }, value);
        cell.dataset.name = column.name; // a narrow page shows it beside the value
        return cell;
      })));
    document.querySelector("#runs tbody").replaceChildren(...rows);
    const all = data.runs.length;
    const limit = shown.length > MOST_SHOWN ? `; charts show the first ${MOST_SHOWN} of the table` : "";
    const on = metrics.map((metric) => measured(metric, data.runs.filter((run) => run.metric === metric))).join(", ");
    document.getElementById("count").textContent = `${shown.length} of ${all} runs${limit}; ${on}`;
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
    const about = { recipe: run.recipe, "bytes compared with": run.against || "an estimate", optimizer: run.optimizer, lr: run.lr, ...run.config, ...(run.versions || {}) };
    const rows = Object.entries(about).map(([name, value]) =>
      element("tr", {}, element("td", { textContent: name }), element("td", { className: "text", textContent: text(value) })));
    made.append(element("pre", { textContent: run.command }), element("table", {}, element("tbody", {}, ...rows)));
  }

  // All of it.

  function redraw() {
    thinwire.forget();
    const runs = shown.slice(0, MOST_SHOWN);
    thinwire.pareto.draw(shown);
    thinwire.curves.draw(runs);
    thinwire.bars.draw(runs);
    thinwire.timeline.draw(runs);
    thinwire.layers.draw(redraw);
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
  thinwire.bars.drawBenches();
  update();
})();
