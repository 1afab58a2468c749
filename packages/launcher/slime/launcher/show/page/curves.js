// Which curves there are, and the views of them.
"use strict";

const Curves = (() => {
  // Parts of a step's time, in their order; a run that generates ahead waits for less than it generates.
  const PHASES = [
    ["generate", "perf/rollout_wait_time", "perf/rollout_time"], ["offload", "perf/offload_time"], ["train", "perf/train_time"],
    ["save", "perf/save_time"], ["onload", "perf/onload_time"], ["update weights", "perf/update_weights_time"],
  ];
  const MAIN = [
    ["Reward", "rollout/raw_reward"], ["Response length", "rollout/response_lengths"], ["Truncated", "rollout/truncated_ratio"],
    ["Loss", "train/loss"], ["Gradient norm", "train/grad_norm"], ["Entropy", "train/entropy_loss"],
    ["Log-probs of engine and trainer apart", "train/train_rollout_logprob_abs_diff"], ["Groups without a difference", "rollout/zero_std_ratio"],
    ["Staleness", "rollout/staleness"], ["Tokens per second", "perf/tokens_per_second"],
  ];

  // The phases of each step and the rest of it: [{name, index, values}]. A phase has the same colour in every run.
  function phases(values) {
    const total = values["perf/step_time"], found = [];
    if (!total) return found;
    const rest = total.map((value) => value || 0);
    PHASES.forEach(([name, ...keys], index) => {
      const key = keys.find((each) => values[each]);
      if (!key) return;
      found.push({ name, index, values: values[key] });
      values[key].forEach((value, i) => { rest[i] -= value || 0; });
    });
    found.push({ name: "other", index: PHASES.length, values: rest.map((value) => Math.max(0, value)) });
    return found;
  }

  function seriesOf(state, key) {
    return state.runs.flatMap((run) => {
      const curves = state.curves[run.number];
      if (!curves || !curves.values[key]) return [];
      return [{ name: run.name, steps: curves.steps, values: curves.values[key], index: run.number }];
    });
  }

  function phaseSeries(state, run) {
    const curves = state.curves[run.number];
    return curves ? phases(curves.values).map((each) => ({ ...each, steps: curves.steps })) : [];
  }

  function evaluationSeries(state, set) {
    return state.runs.flatMap((run) => {
      const points = run.scores[set];
      return points ? [{ name: run.name, steps: points.map((p) => p[0]), values: points.map((p) => p[1]), index: run.number }] : [];
    });
  }

  const sets = (state) => [...new Set(state.runs.flatMap((run) => Object.keys(run.scores)))].sort();

  function allKeys(state) {
    return [...new Set(state.runs.flatMap((run) => Object.keys((state.curves[run.number] || { values: {} }).values)))].sort();
  }

  // Charts that follow the run: each is kept with a function that makes its series anew.
  function followed(page, title, make, options) {
    const figure = Charts.chart(title, make(), options);
    page.updates.push(() => figure.update(make()));
    return figure;
  }

  function runLegend(state) {
    return state.runs.length > 1 ? Charts.legend(state.runs.map((run) => [run.name, run.number])) : null;
  }

  function overview(page, state) {
    const parts = [element("h2", {}, "Reward and time"), runLegend(state)];
    const charts = [followed(page, "Reward", () => seriesOf(state, "rollout/raw_reward"), { smooth: state.runs.some((run) => run.rows > 60) ? 10 : 1 })];
    for (const set of sets(state)) charts.push(followed(page, `Evaluation: ${set}`, () => evaluationSeries(state, set)));
    parts.push(element("div", { class: "charts wide" }, charts));
    for (const run of state.runs) {
      const series = phaseSeries(state, run);
      if (!series.length) continue;
      parts.push(element("div", {}, Charts.legend(series.map((each) => [each.name, each.index]), true),
        followed(page, `Seconds of each step${state.runs.length > 1 ? `: ${run.name}` : ""}`, () => phaseSeries(state, run), { stack: true })));
    }
    return parts;
  }

  function view(page, state, query) {
    const filter = element("input", { type: "search", value: query.filter || "", placeholder: "part of a name", "aria-label": "Filter metrics" });
    const smooth = element("input", { type: "range", min: 1, max: 50, value: query.smooth || 1, "aria-label": "Steps that are averaged" });
    const width = element("output", {}, smooth.value);
    const place = element("div", {});
    function draw() {
      page.updates.length = 0;
      width.textContent = smooth.value;
      const words = filter.value.trim().toLowerCase(), options = { smooth: Number(smooth.value) }, keys = allKeys(state);
      const main = words ? [] : MAIN.filter(([, key]) => keys.includes(key));
      const rest = keys.filter((key) => (words ? key.toLowerCase().includes(words) : !main.some(([, other]) => other === key)));
      const sections = [["", main], ...["rollout", "train", "perf", ""].map((prefix) => [prefix || "more",
        rest.filter((key) => (prefix ? key.startsWith(`${prefix}/`) : !/^(rollout|train|perf)\//.test(key))).map((key) => [key, key])])];
      place.replaceChildren(...sections.filter(([, list]) => list.length).map(([name, list]) => {
        const charts = element("div", { class: "charts" });
        const fill = () => { if (!charts.childElementCount) charts.append(...list.map(([title, key]) => followed(page, title, () => seriesOf(state, key), options))); };
        if (!name || words) { fill(); return element("section", {}, name && element("h2", {}, name), charts); }
        // Drawn when they are opened: there are many.
        return element("details", { ontoggle: fill }, element("summary", {}, element("b", {}, name), ` ${list.length} metrics`), charts);
      }));
    }
    filter.addEventListener("input", draw);
    smooth.addEventListener("input", draw);
    draw();
    const averaged = Object.values(state.curves).some((curves) => curves.averaged);
    return [element("div", { class: "controls" }, labelled("Filter", filter), labelled("Average of", element("span", {}, smooth, " ", width, " steps"))),
      averaged && element("p", { class: "muted" }, "Each point is the mean of neighbouring steps: the run has more steps than points."), runLegend(state), place];
  }

  function evaluations(page, state) {
    const names = sets(state);
    if (!names.length) return [element("p", {}, "No evaluation yet. Name a set with --eval-prompt-data NAME FILE.")];
    const rows = names.flatMap((set) => state.runs.filter((run) => run.scores[set]).map((run) => {
      const points = run.scores[set], first = points[0], last = points[points.length - 1];
      const best = points.reduce((a, b) => (b[1] > a[1] ? b : a));
      return [set, run.name, `${number(first[1])} (${first[0]})`, `${number(last[1])} (${last[0]})`, number(last[1] - first[1], 3), `${number(best[1])} (${best[0]})`];
    }));
    const details = state.runs.flatMap((run) => run.evaluations.flatMap((row) => Object.entries(row).filter(([key]) => key !== "step")
      .map(([key, value]) => [run.name, key.replace(/^eval\//, ""), number(value)])));
    return [table(["set", "run", "first (after steps)", "last", "gain", "best"], rows, { numeric: [2, 3, 4, 5] }), runLegend(state),
      element("div", { class: "charts" }, names.map((set) => followed(page, set, () => evaluationSeries(state, set)))),
      element("h2", {}, "Last evaluation"), table(["run", "metric", "value"], details, { numeric: [2] })];
  }

  return { phases, overview, view, evaluations };
})();

if (typeof module !== "undefined") module.exports = Curves;
