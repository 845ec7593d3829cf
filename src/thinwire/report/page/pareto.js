"use strict";
// Metric against slow-link bytes: one point per method and settings.
thinwire.pareto = (() => {
  const { axes, below, colour, css, data, digits, element, figure, heading, legend, note, place, short, size } = thinwire;
  const HEIGHT = 340;
  const RADIUS = 5;
  const MOST_LABELLED = 30;

  function draw(shown) {
    const section = document.getElementById("pareto");
    section.replaceChildren();
    const wanted = new Set(shown.map((run) => run.label));
    for (const picture of data.pareto) {
      const points = picture.points.filter((point) => wanted.has(point.label));
      if (points.length > 1) drawOne(section, picture, points);
    }
    section.hidden = !section.children.length;
  }

  function drawOne(section, picture, points) {
    const about = data.pareto.length > 1 ? ` (${picture.recipe})` : "";
    const what = `${picture.metric[0].toUpperCase()}${picture.metric.slice(1)} on ${picture.examples}`;
    section.append(heading(`${what} against bytes${about}`), note(explanation(picture, points)));
    const names = legend(points.slice(0, MOST_LABELLED).map((point) => point.label));
    const x = { show: (v) => size(v).replace(".0 ", " "), log: true };
    const options = {
      scales: { x: { time: false, distr: 3, range: () => ends(points) }, y: { range: () => around(points) } },
      axes: axes(x, { show: short(picture.metric) }),
      series: [{}, ...points.map((point) => ({ label: "", paths: () => null, points: dot(point) }))],
      cursor: { points: { show: false }, x: false, y: false },
      hooks: { drawAxes: [(chart) => behind(chart, points)], draw: [(chart) => { names.hidden = name(chart, points); }] },
    };
    const values = [points.map((point) => point.bytes), ...points.map((one) => points.map((point) => (point === one ? one.y : null)))];
    place(section, "over slow-link bytes per node", options, values, (chart) => nearest(chart, points, picture.metric), HEIGHT);
    section.append(names);
  }

  function explanation(picture, points) {
    const parts = [];
    if (points.some((point) => point.front)) parts.push(`Dashed: nothing else has a better ${picture.metric} with as few bytes.`);
    if (points.some((point) => point.std)) parts.push("Bars: standard deviation over seeds.");
    if (picture.left_out) parts.push(`${picture.left_out} that sent nothing cannot be on this axis.`);
    return parts.join(" ");
  }

  const dot = (point) => ({ show: true, size: 2 * RADIUS, width: 1, stroke: css("--panel"), fill: colour(point.label) });

  function ends(points) {
    const all = points.map((point) => point.bytes);
    return [below(Math.min(...all) / 1.5), Math.max(...all) * 1.8];
  }

  function around(points) {
    const low = Math.min(...points.map((point) => point.y - (point.std || 0)));
    const high = Math.max(...points.map((point) => point.y + (point.std || 0)));
    const space = 0.12 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [low - space, high + space];
  }

  // Error bars and the front, in the canvas's own pixels.
  function behind(chart, points) {
    const { ctx } = chart;
    const scale = devicePixelRatio || 1;
    const at = (point, y) => [chart.valToPos(point.bytes, "x", true), chart.valToPos(y, "y", true)];
    ctx.save();
    ctx.lineWidth = 1.4 * scale;
    for (const point of points.filter((one) => one.std)) {
      const [x, top] = at(point, point.y + point.std);
      const [, bottom] = at(point, point.y - point.std);
      ctx.strokeStyle = colour(point.label);
      ctx.beginPath();
      for (const y of [top, bottom]) {
        ctx.moveTo(x - 4 * scale, y);
        ctx.lineTo(x + 4 * scale, y);
      }
      ctx.moveTo(x, top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
    ctx.strokeStyle = css("--soft");
    ctx.setLineDash([5 * scale, 4 * scale]);
    ctx.beginPath();
    let before = null;
    for (const point of points.filter((one) => one.front)) {
      const [x, y] = at(point, point.y);
      if (before === null) ctx.moveTo(x, y);
      else ctx.lineTo(x, before), ctx.lineTo(x, y); // better only from these bytes on
      before = y;
    }
    if (before !== null) ctx.lineTo(chart.bbox.left + chart.bbox.width, before);
    ctx.stroke();
    ctx.restore();
  }

  // Names beside points, where there is space; whether all have found some.
  function name(chart, points) {
    const { ctx, bbox } = chart;
    const scale = devicePixelRatio || 1;
    const taken = points.map((point) => boxAround(chart, point, scale));
    let all = points.length <= MOST_LABELLED;
    ctx.save();
    ctx.font = `${12 * scale}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    const first = [...points].sort((a, b) => Boolean(b.front) - Boolean(a.front));
    for (const point of points.length <= MOST_LABELLED ? first : first.filter((one) => one.front)) {
      const wide = ctx.measureText(point.label).width;
      const [x, y] = [chart.valToPos(point.bytes, "x", true), chart.valToPos(point.y, "y", true)];
      const away = (RADIUS + 6) * scale;
      const free = [-1, 1, 0].flatMap((up) => [[x + away, y + up * away], [x - away - wide, y + up * away]])
        .map(([left, middle]) => ({ left, right: left + wide, top: middle - 7 * scale, bottom: middle + 7 * scale, middle }))
        .find((box) => inside(box, bbox) && !taken.some((other) => meet(box, other)));
      all = all && Boolean(free);
      if (!free) continue;
      taken.push(free);
      ctx.fillStyle = css("--ink");
      ctx.fillText(point.label, free.left, free.middle);
    }
    ctx.restore();
    return all;
  }

  function boxAround(chart, point, scale) {
    const [x, y] = [chart.valToPos(point.bytes, "x", true), chart.valToPos(point.y, "y", true)];
    const up = point.std ? Math.abs(chart.valToPos(point.y + point.std, "y", true) - y) : 0;
    const half = RADIUS * scale;
    return { left: x - half, right: x + half, top: y - Math.max(half, up), bottom: y + Math.max(half, up) };
  }

  const inside = (box, bbox) => box.left >= bbox.left && box.right <= bbox.left + bbox.width && box.top >= bbox.top && box.bottom <= bbox.top + bbox.height;
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

  function nearest(chart, points, metric) {
    const { left, top } = chart.cursor;
    if (left < 0) return "";
    const apart = (point) => Math.hypot(chart.valToPos(point.bytes, "x") - left, chart.valToPos(point.y, "y") - top);
    const best = points.reduce((a, b) => (apart(b) < apart(a) ? b : a));
    const spread = best.std === null ? "" : ` ± ${figure(metric, best.std)} over ${best.seeds} seeds`;
    const share = best.share === null ? "" : `, ${digits(100 * best.share, 3)} % of all-reduce`;
    return `${best.label}: ${figure(metric, best.y)}${spread}, ${size(best.bytes)}${share}`;
  }

  return { draw };
})();
