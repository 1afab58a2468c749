// Curves and stacked areas as SVG, with a cursor for pointer and keyboard.
"use strict";

const Charts = (() => {
  const HEIGHT = 190, MARGIN = { left: 50, right: 10, top: 8, bottom: 22 };

  // Round numbers that cover [low, high].
  function ticks(low, high, count = 5) {
    if (!(high > low)) return [low];
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= raw * 0.7);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  // [lowest, highest] of the finite values, with a little room.
  function extent(values, zero = false) {
    let low = zero ? 0 : Infinity, high = zero ? 0 : -Infinity;
    for (const value of values) {
      if (value === null || !Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) return [0, 1];
    if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
    return [low, high];
  }

  // The mean of each value and those up to `width` before it; nothing where there is no value.
  function smoothed(values, width) {
    if (width <= 1) return values;
    return values.map((value, i) => {
      if (value === null) return null;
      const near = values.slice(Math.max(0, i - width + 1), i + 1).filter((v) => v !== null);
      return near.reduce((a, b) => a + b, 0) / near.length;
    });
  }

  function linePath(xs, ys, x, y) {
    let text = "", pen = false;
    for (let i = 0; i < xs.length; i += 1) {
      if (ys[i] === null || ys[i] === undefined) { pen = false; continue; }
      text += `${pen ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
      // A point alone is a dot.
      if (!pen && (ys[i + 1] === null || ys[i + 1] === undefined)) text += "h.1";
      pen = true;
    }
    return text;
  }

  // Sums of the series up to each, for stacked areas; what is not known counts as 0.
  function stacked(series) {
    const sums = [];
    series.forEach((values, n) => sums.push(values.map((value, i) => (n ? sums[n - 1][i] : 0) + Math.max(0, value || 0))));
    return sums;
  }

  function indexNear(xs, at) {
    let best = 0;
    for (let i = 1; i < xs.length; i += 1) if (Math.abs(xs[i] - at) < Math.abs(xs[best] - at)) best = i;
    return best;
  }

  // series: [{name, steps, values, index}], `index` chooses colour and dashes. options: {smooth, stack, zero, unit}.
  function chart(title, series, options = {}) {
    const readout = element("span", { class: "readout" });
    const svg = element("svg", { tabindex: "0", role: "img", height: HEIGHT });
    const figure = element("figure", {}, element("figcaption", {}, element("b", {}, title), readout), svg);
    let at = null, width = 0;

    function draw() {
      const shown = series.filter((each) => each.steps.length);
      svg.replaceChildren();
      if (!shown.length) { svg.append(element("text", { x: 10, y: 30 }, "no values")); return; }
      const plotted = shown.map((each) => ({ ...each, plotted: smoothed(each.values, options.smooth || 1) }));
      const sums = options.stack ? stacked(plotted.map((each) => each.plotted)) : null;
      const [xLow, xHigh] = extent(shown.flatMap((each) => [each.steps[0], each.steps[each.steps.length - 1]]));
      const [yLow, yHigh] = extent((sums || plotted.map((each) => each.plotted)).flat(), options.stack || options.zero);
      const x = (v) => MARGIN.left + ((v - xLow) / (xHigh - xLow)) * (width - MARGIN.left - MARGIN.right);
      const y = (v) => HEIGHT - MARGIN.bottom - ((v - yLow) / (yHigh - yLow)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      for (const value of ticks(yLow, yHigh, 4)) {
        svg.append(element("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }),
          element("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value, 3)));
      }
      for (const value of ticks(xLow, xHigh, Math.max(2, Math.floor(width / 90))).filter(Number.isInteger))
        svg.append(element("text", { x: x(value), y: HEIGHT - 5, "text-anchor": "middle" }, number(value)));
      plotted.forEach((each, n) => {
        const stroke = { stroke: colour(each.index), "stroke-dasharray": options.stack ? null : dash(each.index) || null };
        if (sums) {
          const base = n ? sums[n - 1] : sums[0].map(() => 0);
          const back = linePath([...each.steps].reverse(), [...base].reverse(), x, y).replace(/^M/, "L");
          svg.append(element("path", { d: `${linePath(each.steps, sums[n], x, y)}${back}Z`, fill: colour(each.index), "fill-opacity": ".55", stroke: colour(each.index) }));
          return;
        }
        if (options.smooth > 1) svg.append(element("path", { class: "raw", d: linePath(each.steps, each.values, x, y), stroke: stroke.stroke }));
        svg.append(element("path", { class: "line", d: linePath(each.steps, each.plotted, x, y), ...stroke }));
        if (each.steps.length < 40) each.steps.forEach((step, i) => {
          if (each.plotted[i] !== null) svg.append(element("circle", { cx: x(step), cy: y(each.plotted[i]), r: 2.5, fill: stroke.stroke }));
        });
      });
      const cursor = element("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
      svg.append(cursor);
      const summary = shown.map((each) => {
        const known = each.values.filter((v) => v !== null);
        return `${each.name}: ${number(known[0])} at the start, ${number(known[known.length - 1])} at the end`;
      }).join("; ");
      svg.setAttribute("aria-label", `${title}. ${summary}. Left and right arrows read points.`);

      const last = () => shown.map((each) => {
        const known = each.values.filter((v) => v !== null);
        return (shown.length > 1 ? `${each.name} ` : "") + number(known[known.length - 1]);
      }).join(" · ");
      figure.point = (step, spoken) => {
        at = step;
        if (step === null) { cursor.setAttribute("visibility", "hidden"); readout.textContent = last(); return; }
        cursor.setAttribute("visibility", "visible");
        cursor.setAttribute("x1", x(step)); cursor.setAttribute("x2", x(step));
        const values = shown.map((each) => {
          const i = indexNear(each.steps, step);
          return (shown.length > 1 ? `${each.name} ` : "") + number(each.values[i]);
        });
        readout.setAttribute("aria-live", spoken ? "polite" : "off");
        readout.textContent = `step ${number(step)}: ${values.join(" · ")}`;
      };
      figure.point(at, false);
      svg.onpointermove = (event) => {
        const box = svg.getBoundingClientRect(), longest = shown[0].steps;
        const wanted = xLow + ((event.clientX - box.left - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (xHigh - xLow);
        figure.point(longest[indexNear(longest, wanted)], false);
      };
      svg.onpointerleave = () => figure.point(null, false);
      svg.onkeydown = (event) => {
        const longest = shown[0].steps, move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
        if (move === undefined) return;
        event.preventDefault();
        const from = at === null ? longest.length - 1 : indexNear(longest, at);
        figure.point(longest[Math.min(longest.length - 1, Math.max(0, from + move))], true);
      };
      svg.onblur = () => figure.point(null, false);
    }

    figure.update = (newSeries) => { series = newSeries; if (width) draw(); };
    new ResizeObserver(() => {
      const found = Math.round(svg.getBoundingClientRect().width);
      if (found && found !== width) { width = found; draw(); }
    }).observe(figure);
    return figure;
  }

  // filled: of areas, not of lines.
  function legend(names, filled = false) {
    const mark = (index) => (filled ? element("rect", { width: 26, height: 10, fill: colour(index), "fill-opacity": ".7" })
      : element("path", { d: "M0 5H26", stroke: colour(index), "stroke-width": 3, "stroke-dasharray": dash(index) || null }));
    return element("ul", { class: "legend" }, names.map(([name, index]) => element("li", {}, element("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, mark(index)), name)));
  }

  return { ticks, extent, smoothed, linePath, stacked, indexNear, chart, legend };
})();

if (typeof module !== "undefined") module.exports = Charts;
