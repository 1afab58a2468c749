// The views of the page, their addresses, and what keeps them up to date while a run goes on.
"use strict";

(() => {
  const POLL = 2000, QUIET_POLL = 10000;
  const VIEWS = [["overview", "Overview"], ["curves", "Curves"], ["samples", "Samples"], ["evaluation", "Evaluation"], ["settings", "Settings"], ["checks", "Checks"]];
  const embedded = JSON.parse(document.getElementById("embedded").textContent);
  const source = Data.source(embedded, Data.fetchJson);
  const state = { runs: [], curves: {}, checks: {} };
  const main = document.getElementById("main"), live = document.getElementById("live");
  // Of the view that is shown: updates on new data, keys, and where it leads.
  const page = {
    updates: [], keys: {}, current: null,
    go: (view, query) => { location.hash = Data.address(view, query); },
    remember: (view, query) => { shownAddress = Data.address(view, query); history.replaceState(null, "", shownAddress); },
  };
  let shownAddress = null, turn = 0, shownParts = "";

  // The parts that a view has: it is made anew where a run gets its first step, sample or set, or another evaluation.
  const parts = () => JSON.stringify(state.runs.map((run) => [run.rows > 0, run.kept > 0, Object.values(run.scores).map((points) => points.length)]));

  async function refresh() {
    const runs = await source.get("runs");
    for (const run of runs) {
      const known = state.curves[run.number];
      if (known && known.rows === run.rows && known.edition === run.edition) continue;
      const query = { run: run.number };
      if (known && !source.isFile) Object.assign(query, { after: known.steps[known.steps.length - 1] ?? -1, edition: known.edition });
      state.curves[run.number] = Data.merged(known, await source.get("curves", query));
    }
    state.runs = runs;
    for (const run of runs) {
      const known = state.checks[run.number];
      if (!known || known.checked < known.files || known.files !== run.kept) state.checks[run.number] = await source.get("checks", { run: run.number });
    }
  }

  function announce() {
    const going = state.runs.filter((run) => run.state === "running");
    const text = source.isFile ? "a file: nothing is updated" : going.map((run) => `${run.name}: ${run.phase}`).join("; ") || "no run is going on";
    if (live.textContent !== text) live.textContent = text;
    const found = Object.values(state.checks).reduce((sum, checks) => sum + checks.checks.reduce((n, each) => n + each.count, 0), 0);
    const link = document.querySelector('#views a[href^="#/checks"]');
    link.textContent = found ? `Checks (${found})` : "Checks";
  }

  function card(run) {
    const ago = run.started === null ? null : (run.state === "running" ? run.now : run.updated || run.now) - run.started;
    const done = run.step === null ? 0 : run.step + 1;
    const pairs = [["Model", run.model || "-"], ["Step", `${done}${run.num_steps ? ` of ${run.num_steps}` : ""}`], ["Reward", number(run.reward, 3)],
      ...Object.entries(run.scores).map(([set, points]) => [set, `${number(points[0][1], 3)} → ${number(points[points.length - 1][1], 3)}`]),
      ["Took", age(ago)], ["Started", run.started === null ? "-" : new Date(run.started * 1000).toLocaleString()], ["Files", run.path]];
    if (run.state === "running") pairs.splice(1, 0, ["Now", run.phase], ["Last sign", `${age(run.now - run.updated)} ago`]);
    return element("article", { class: "card" }, element("h3", {}, run.name, element("span", { class: `badge ${run.state}` }, run.state)),
      run.num_steps ? element("progress", { max: run.num_steps, value: done, "aria-label": `${done} of ${run.num_steps} steps` }) : null,
      definitions(pairs),
      run.error ? element("p", { class: "alert" }, run.error) : null,
      run.logs.map((log) => element("details", {}, element("summary", {}, `logs/${log.log}`), element("pre", {}, log.lines.join("\n")))));
  }

  async function overview() {
    const cards = element("div", { class: "cards" }, state.runs.map(card)), found = element("div", {});
    const findings = () => {
      const lines = state.runs.map((run) => [run, state.checks[run.number]]).filter(([, checks]) => checks && checks.findings.length);
      found.replaceChildren(...lines.map(([run, checks]) => element("p", { class: "alert" }, element("a", { href: Data.address("checks", {}) },
        `${state.runs.length > 1 ? `${run.name}: ` : ""}${checks.checks.filter((each) => each.count).map((each) => `${each.title} (${each.count})`).join(", ")}`), " - the checks found something in the samples.")));
    };
    findings();
    page.updates.push(() => { if (!cards.contains(document.activeElement)) cards.replaceChildren(...state.runs.map(card)); findings(); });
    const content = [cards, found, ...Curves.overview(page, state), element("h2", {}, "Samples before and after")];
    for (const run of state.runs) {
      const answer = await source.get("pairs", { run: run.number });
      if (state.runs.length > 1) content.push(element("h3", {}, run.name));
      content.push(Samples.pairs({ ...answer, pairs: answer.pairs.slice(0, 5) }));
    }
    return content;
  }

  async function evaluation() {
    const content = Curves.evaluations(page, state);
    for (const run of state.runs) {
      const answer = await source.get("pairs", { run: run.number });
      if (answer.eval) content.push(element("h2", {}, `Samples before and after${state.runs.length > 1 ? `: ${run.name}` : ""}`), Samples.pairs(answer));
    }
    return content;
  }

  async function settings(query) {
    const all = await source.get("settings"), several = state.runs.length > 1;
    const filter = element("input", { type: "search", placeholder: "part of a name", "aria-label": "Filter settings" });
    let shown = query.show || (several ? "differs" : "given");
    const place = element("div", {});
    function draw() {
      const words = filter.value.trim().toLowerCase();
      const rows = all.filter((row) => (shown === "all" || row[shown]) && row.name.includes(words));
      place.replaceChildren(rows.length ? table(["setting", ...state.runs.map((run) => run.name)], rows.map((row) => [element("code", {}, row.name), ...row.values]),
        { classes: rows.map((row) => (row.differs ? "differs" : "")) }) : element("p", {}, "No setting."));
    }
    filter.addEventListener("input", draw);
    draw();
    const options = [...(several ? [["differs", "different ones"]] : []), ["given", "given ones"], ["all", "all"]];
    return [element("div", { class: "controls" }, choice("Show", options, shown, (value) => { shown = value; draw(); }), labelled("Filter", filter)), place];
  }

  function checksOf(run) {
    const answer = state.checks[run.number];
    if (!answer) return [];
    const findings = (check) => answer.findings.filter((each) => each.check === check);
    const link = (each) => element("a", { href: Data.address("samples", { run: run.number, kind: each.eval ? "eval" : "train", step: each.step, row: each.row, start: Math.floor(each.row / 64) * 64 }) }, `step ${each.step}, ${each.index === null ? "a row" : `sample ${each.index}`}`);
    return [state.runs.length > 1 ? element("h2", {}, run.name) : null,
      element("p", { class: "muted" }, `${answer.checked} of ${answer.files} steps and evaluations with samples are checked.`),
      answer.checks.map((each) => element("section", { class: "card" }, element("h3", {}, each.title, element("span", { class: `badge ${each.count ? "bad" : "good"}` }, each.count ? `${each.count} found` : "nothing found")),
        element("p", { class: "muted" }, each.meaning),
        findings(each.check).length ? element("ul", { class: "findings" }, findings(each.check).slice(0, 12).map((one) => element("li", {}, link(one), `: ${one.text}`)),
          each.count > 12 ? element("li", { class: "muted" }, `and ${each.count - 12} more`) : null) : null))];
  }

  function checks() {
    const place = element("div", { class: "checks" });
    const draw = () => place.replaceChildren(...state.runs.flatMap(checksOf).flat().filter(Boolean));
    draw();
    page.updates.push(() => { if (!place.contains(document.activeElement)) draw(); });
    return [place];
  }

  async function show() {
    if (location.hash === "#main") { main.focus(); return; }
    const { view, query } = Data.parseAddress(location.hash), mine = ++turn;
    shownAddress = location.hash;
    shownParts = parts();
    markCurrent(document.querySelectorAll("#views a"), (link) => link.getAttribute("href") === `#/${view}`, "page");
    page.updates = [];
    page.keys = {};
    const makers = { overview, evaluation, settings: () => settings(query), checks, curves: () => Curves.view(page, state, query), samples: () => Samples.view(page, state, query, source) };
    try {
      const content = await (makers[view] || overview)();
      if (mine === turn) main.replaceChildren(...content.flat().filter(Boolean));
    } catch (error) {
      if (mine === turn) main.replaceChildren(element("p", { class: "alert" }, error.message));
    }
  }

  async function follow() {
    let wait = QUIET_POLL;
    try {
      await refresh();
      announce();
      page.updates.forEach((update) => update());
      const reads = main.contains(document.activeElement) && document.activeElement !== main;
      if (parts() !== shownParts && !reads) await show();
      const unchecked = state.runs.some((run) => state.checks[run.number] && state.checks[run.number].checked < state.checks[run.number].files);
      if (unchecked || state.runs.some((run) => run.state === "running")) wait = POLL;
    } catch (error) {
      live.textContent = `slime show does not answer (${error.message}); it is asked again`;
    }
    if (!source.isFile) setTimeout(follow, wait);
  }

  function setTheme(theme) {
    document.documentElement.dataset.theme = theme;
  }

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  document.getElementById("views").append(...VIEWS.map(([key, title]) => element("a", { href: `#/${key}` }, title)));
  if (source.note) { const note = document.getElementById("note"); note.hidden = false; note.textContent = source.note; }
  window.addEventListener("hashchange", () => { if (location.hash !== shownAddress) show(); });
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const view = VIEWS[Number(event.key) - 1];
    if (view) page.go(view[0]);
    else if (page.keys[event.key]) page.keys[event.key]();
  });
  refresh().then(async () => { announce(); await show(); if (!source.isFile) setTimeout(follow, POLL); },
    (error) => { main.replaceChildren(element("p", { class: "alert" }, error.message)); });
})();
