// Requests to the server of the page, or to the data inside a file that has no server.
"use strict";

const Data = (() => {
  // The key of a request inside a file; html_page.request makes the same.
  function requestKey(name, query = {}) {
    return `${name}?` + Object.keys(query).sort().map((key) => `${key}=${query[key]}`).join("&");
  }

  // `embedded`: answers by their keys, or null.
  function source(embedded, fetchJson) {
    return {
      isFile: embedded !== null,
      note: embedded ? embedded.note : null,
      async get(name, query = {}) {
        if (embedded === null) return fetchJson(name, query);
        const key = requestKey(name, query);
        if (!(key in embedded)) throw new Error("not in this file: `slime show` has all samples");
        return embedded[key];
      },
    };
  }

  async function fetchJson(name, query) {
    const response = await fetch(`data/${name}?${new URLSearchParams(query)}`);
    const found = await response.json();
    if (!response.ok) throw new Error(found.error || response.statusText);
    return found;
  }

  // Adds an answer of "curves" to what is known of a run: {steps, values, edition, rows}. Returns the sum of both.
  function merged(known, answer) {
    if (!known || answer.whole || known.edition !== answer.edition) return answer;
    const length = known.steps.length, more = answer.steps.length, values = {};
    for (const key of new Set([...Object.keys(known.values), ...Object.keys(answer.values)])) {
      const old = known.values[key] || new Array(length).fill(null);
      values[key] = old.concat(answer.values[key] || new Array(more).fill(null));
    }
    return { ...answer, steps: known.steps.concat(answer.steps), values };
  }

  // Ranges [first, last] of steps: the nearest step to `step`, and the one before or after it.
  function nearest(ranges, step) {
    let best = null;
    for (const [first, last] of ranges) {
      const inside = Math.min(Math.max(step, first), last);
      if (best === null || Math.abs(inside - step) < Math.abs(best - step)) best = inside;
    }
    return best;
  }

  function neighbour(ranges, step, direction) {
    let best = null;
    for (const [first, last] of ranges) {
      if (direction > 0 && last > step && best === null) best = Math.max(first, step + 1);
      if (direction < 0 && first < step) best = Math.min(last, step - 1);
    }
    return best;
  }

  // The views of the page as addresses: "#/samples?run=0&step=3".
  function parseAddress(hash) {
    const [view, query] = hash.replace(/^#\/?/, "").split("?");
    return { view: view || "overview", query: Object.fromEntries(new URLSearchParams(query || "")) };
  }

  function address(view, query = {}) {
    const text = new URLSearchParams(query).toString();
    return `#/${view}${text ? "?" + text : ""}`;
  }

  return { requestKey, source, fetchJson, merged, nearest, neighbour, parseAddress, address };
})();

if (typeof module !== "undefined") module.exports = Data;
