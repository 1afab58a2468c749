// Samples of a step by group, and one of them token by token.
"use strict";

const Samples = (() => {
  const PAGE = 64, DRAWN = 1500;

  // Members of each group in the order of their first sample.
  function groups(rows) {
    const found = new Map();
    for (const row of rows) {
      const key = `${row.dataset} ${row.group_index}`;
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(row);
    }
    return [...found.values()];
  }

  // Everything that is known of token `at` of a sample; `response`: its place in the response, or null in the prompt.
  function tokenFacts(sample, at) {
    const response = at - sample.prompt_length, inside = response >= 0;
    const pick = (list) => (inside && list ? list[response] ?? null : null);
    const engine = pick(sample.engine_log_probs), trainer = pick(sample.trainer_log_probs);
    return {
      place: at, response: inside ? response : null, id: sample.tokens[at], text: sample.texts ? sample.texts[at] : null, engine, trainer,
      apart: engine !== null && trainer !== null ? Math.abs(engine - trainer) : null,
      mask: inside ? (sample.loss_mask ? sample.loss_mask[response] : 1) : null, version: inside ? pick(sample.weight_versions) : null,
    };
  }

  // 0 to 1: the strength of a token's colour.
  function strength(facts, by) {
    if (by === "apart") return facts.apart === null ? 0 : Math.min(1, facts.apart / 0.5);
    if (by === "mask") return facts.mask === 1 ? 0.6 : 0;
    return facts.engine === null || (facts.engine === 0 && facts.mask === 0) ? 0 : Math.min(1, -facts.engine / 5);
  }

  function visible(text, id) {
    if (text === null || text === undefined) return `${id} `;
    return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t") || "∅";
  }

  function rowText(row) {
    return row.response === "" ? "(empty)" : row.response;
  }

  // The rewards of a group in words; equal ones give the usual estimators nothing to learn from.
  function spread(members) {
    const rewards = members.map((row) => row.reward).filter((value) => value !== null);
    if (rewards.length < 2) return "";
    const mean = rewards.reduce((a, b) => a + b, 0) / rewards.length;
    const equal = rewards.every((value) => value === rewards[0]);
    return ` · ${rewards.length} shown, mean reward ${number(mean, 3)}${equal ? ", all equal" : ""}`;
  }

  function list(rows, current, open) {
    return groups(rows).map((members) => element("section", { class: "group", "aria-label": `group ${members[0].group_index}` },
      element("p", {}, element("span", { class: "muted" }, members[0].dataset === "train" ? `group ${members[0].group_index} · ` : `${members[0].dataset} · `),
        element("span", { class: "text" }, members[0].prompt), members[0].label ? element("span", { class: "muted" }, ` label ${members[0].label}`) : null, element("span", { class: "muted" }, spread(members))),
      element("ul", { class: "rows" }, members.map((row) => element("li", {}, element("button", { type: "button", "data-row": row.row, "aria-current": row.row === current ? "true" : null, onclick: () => open(row.row) },
        element("span", { class: "reward" }, number(row.reward, 3)), element("span", { class: "text" }, rowText(row)),
        element("span", { class: "more muted" }, row.findings.length ? element("span", { class: "badge bad" }, row.findings.join(", ")) : null, ` ${row.status} · ${row.response_length}`)))))));
  }

  function factsList(sample) {
    const pairs = [["Reward", sample.reward_json || number(sample.reward)], ["Label", sample.label], ["Status", sample.status], ["Length", `${sample.response_length} of ${sample.num_tokens} tokens`],
      ["Weights", [...new Set(sample.weight_versions.filter((v) => v !== null))].join(", ") || "-"], ["Group, index", `${sample.group_index}, ${sample.index}`]];
    if (sample.metadata && sample.metadata !== "{}") pairs.push(["Metadata", sample.metadata]);
    return definitions(pairs);
  }

  function detail(sample) {
    let at = Math.min(sample.prompt_length, sample.tokens.length - 1), by = "engine", drawn = Math.min(sample.tokens.length, DRAWN);
    const facts = element("dl", { class: "detail", "aria-live": "polite" });
    const strip = element("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens: left and right arrows read them one by one" });
    const more = element("button", { type: "button", onclick: () => { drawn = Math.min(sample.tokens.length, drawn + DRAWN); draw(); } });

    function show(next, scroll) {
      at = Math.max(0, Math.min(drawn - 1, next));
      const known = tokenFacts(sample, at);
      strip.querySelector(".current")?.classList.remove("current");
      const node = strip.querySelector(`[data-at="${at}"]`);
      node?.classList.add("current");
      if (scroll) node?.scrollIntoView({ block: "nearest" });
      const pairs = [["token", `${JSON.stringify(known.text ?? "")} (${known.id})`], [known.response === null ? "in the prompt" : "in the response", known.response === null ? known.place : known.response],
        ["engine", number(known.engine)], ["trainer", number(known.trainer)], ["apart", number(known.apart, 2)], ["mask", known.mask === null ? "-" : known.mask], ["weights", known.version ?? "-"]];
      facts.replaceChildren(...pairs.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))));
    }

    function draw() {
      const parts = [];
      for (let i = 0; i < drawn; i += 1) {
        const known = tokenFacts(sample, i), inside = known.response !== null;
        const classes = [inside ? "" : "prompt", known.response === 0 ? "begin" : "", inside && known.mask === 0 ? "masked" : "", inside && known.version === null ? "foreign" : ""].filter(Boolean).join(" ");
        const tint = Math.round(strength(known, by) * 75), base = by === "apart" ? "--c1" : by === "mask" ? "--c2" : "--c0";
        parts.push(element("span", { class: classes || null, "data-at": i, style: tint ? { background: `color-mix(in srgb, var(${base}) ${tint}%, transparent)` } : {} }, visible(known.text, known.id)));
      }
      strip.replaceChildren(...parts);
      more.hidden = drawn >= sample.tokens.length;
      more.textContent = `Show more of ${sample.tokens.length} tokens`;
      show(at, false);
    }

    strip.addEventListener("click", (event) => { const place = event.target.dataset?.at; if (place !== undefined) show(Number(place), false); });
    strip.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (move === undefined) return;
      event.preventDefault();
      show(move === -Infinity ? 0 : move === Infinity ? drawn - 1 : at + move, true);
    });
    draw();

    const rows = () => sample.tokens.slice(sample.prompt_length, sample.prompt_length + DRAWN).map((id, i) => {
      const known = tokenFacts(sample, sample.prompt_length + i);
      return [String(i), visible(known.text, known.id), String(id), number(known.engine), number(known.trainer), number(known.apart, 2), String(known.mask), known.version ?? "-"];
    });
    const asTable = element("details", { ontoggle: (event) => {
      if (event.target.open && event.target.childElementCount === 1) event.target.append(table(["place", "token", "id", "engine", "trainer", "apart", "mask", "weights"], rows(), { numeric: [0, 2, 3, 4, 5, 6, 7] }));
    } }, element("summary", {}, "The response as a table"));
    return [
      sample.findings.length ? element("div", { class: "alert" }, element("ul", { class: "findings" }, sample.findings.map((each) => element("li", {}, element("b", {}, each.check), `: ${each.text}`)))) : null,
      factsList(sample),
      element("div", { class: "controls" }, choice("Colour", [["engine", "unlikely"], ["apart", "engine and trainer apart"], ["mask", "trained on"]], by, (value) => { by = value; draw(); })),
      facts, strip, more,
      sample.trainer_log_probs === null && sample.dataset === "train" ? element("p", { class: "muted" }, "No log-probs of the trainer: it skips samples without an advantage, as in a group with equal rewards.") : null,
      element("p", { class: "muted" }, "The bar marks the first token of the response. Struck through: not trained on. Dotted: not generated by the model."), asTable,
      element("details", {}, element("summary", {}, "Texts"), element("h3", {}, "Prompt"), element("pre", {}, sample.prompt), element("h3", {}, "Response"), element("pre", {}, sample.response)),
    ];
  }

  // query: run, kind, step, start, row.
  async function view(page, state, query, source) {
    const run = Number(query.run || 0), kind = query.kind || "train", steps = await source.get("steps", { run });
    const ranges = steps[kind].length ? steps[kind] : steps[kind === "train" ? "eval" : "train"], shownKind = steps[kind].length ? kind : kind === "train" ? "eval" : "train";
    if (!ranges.length) return [element("p", {}, "This run has kept no samples yet: --log-samples N keeps those of N groups per step.")];
    const last = ranges[ranges.length - 1][1], step = Data.nearest(ranges, query.step === undefined ? last : Number(query.step));
    const go = (changes) => page.go("samples", { ...{ run, kind: shownKind, step }, ...changes });
    const start = Number(query.start || 0), answer = await source.get("samples", { run, kind: shownKind, step, start });
    const row = query.row === undefined ? (answer.rows[0] || {}).row : Number(query.row), numberField = element("input", { type: "number", value: step, min: ranges[0][0], max: last, "aria-label": "Step", onchange: (event) => go({ step: event.target.value }) });
    // Of a run that goes on there may be more steps by now.
    const turn = async (direction) => {
      const next = Data.neighbour((await source.get("steps", { run }))[shownKind], step, direction);
      if (next !== null) go({ step: next });
    };
    const place = element("div", { "aria-label": "Sample" }), shown = element("div", {}, list(answer.rows, row, (next) => open(next)));

    async function open(next) {
      markCurrent(shown.querySelectorAll("button[data-row]"), (button) => Number(button.dataset.row) === next, "true");
      page.remember("samples", { run, kind: shownKind, step, start, row: next });
      try {
        place.replaceChildren(...detail(await source.get("sample", { run, kind: shownKind, step, row: next })).filter(Boolean));
      } catch (error) {
        place.replaceChildren(element("p", { class: "alert warn" }, error.message));
      }
      page.current = next;
    }

    page.keys = {
      "[": () => turn(-1), "]": () => turn(1),
      j: () => move(1), k: () => move(-1),
    };
    function move(direction) {
      const order = answer.rows.map((each) => each.row), next = order[order.indexOf(page.current) + direction];
      if (next === undefined) return;
      open(next);
      shown.querySelector(`button[data-row="${next}"]`)?.focus();
    }
    if (row !== undefined) await open(row);
    const pages = answer.total > PAGE ? element("div", { class: "controls" },
      element("button", { type: "button", disabled: start === 0, onclick: () => go({ start: Math.max(0, start - PAGE) }) }, "Earlier"),
      `${start + 1} to ${Math.min(answer.total, start + answer.rows.length)} of ${answer.total}`,
      element("button", { type: "button", disabled: start + PAGE >= answer.total, onclick: () => go({ start: start + PAGE }) }, "Later")) : null;
    return [element("div", { class: "controls" },
      state.runs.length > 1 ? labelled("Run", select(state.runs.map((each) => [each.number, each.name]), run, (value) => go({ run: value }), "Run")) : null,
      steps.train.length && steps.eval.length ? choice("Samples", [["train", "trained on"], ["eval", "evaluation"]], shownKind, (value) => go({ kind: value })) : null,
      element("button", { type: "button", onclick: () => turn(-1), "aria-label": "Previous step" }, "←"), labelled(shownKind === "eval" ? "After steps" : "Step", numberField),
      element("button", { type: "button", onclick: () => turn(1), "aria-label": "Next step" }, "→"),
      element("button", { type: "button", onclick: () => go({ step: Number.MAX_SAFE_INTEGER }) }, "Newest")),
    element("div", { class: "split" }, element("div", {}, shown, pages), place)];
  }

  function pairs(answer) {
    const both = answer.pairs.filter(([, after]) => after);
    if (!both.length) return element("p", { class: "muted" }, "Appears when there are two evaluations, or two steps with samples.");
    return element("div", { class: "table", tabindex: "0" }, table(["prompt", "label", `before (${answer.before} steps)`, "", `after (${answer.after} steps)`, ""], both.map(([old, now]) => [
      element("span", { class: "text" }, old.prompt), old.label, element("span", { class: "text" }, rowText(old)), number(old.reward, 3), element("span", { class: "text" }, rowText(now)), number(now.reward, 3)]), { numeric: [3, 5] }).firstChild);
  }

  return { groups, spread, tokenFacts, strength, view, pairs };
})();

if (typeof module !== "undefined") module.exports = Samples;
