/* The matrix explorer. It looks up what the engine said (data.js, written by export.py) and knows no limit of any kernel.
   A question is {arch, dims: [qk_nope, qk_rope, v_head], dtype, fa_version: null or a number, installed: null or
   {distribution: version}}; it stands in the address after #. */
"use strict";

const explorer = (() => {
  const data = window.MATRIX;
  const texts = data.texts;
  const string = (number) => data.strings[number];
  const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => (name in values ? values[name] : all));
  const packages = new Map(data.packages);
  const kernelOf = (record) => data.kernels[record[0]];
  const labelOf = (kernel) => `${kernel[1]}/${kernel[0]}`;
  const dimsText = (dims) => `(${dims.join(", ")})`;
  const blocks = new Map(Object.entries(data.blocks).map(([name, dims]) => [dimsText(dims), name]));
  const blockOf = (dims) => blocks.get(dimsText(dims));

  // ---- the answer ---------------------------------------------------------------------------------------------------

  /* [kernels with a place in the order, where the order stands, records best first]; null where nothing was exported. */
  function cells(arch, dims) {
    const block = blockOf(dims);
    if (block) return data.cells[arch][block];
    const [qk, v] = [dims[0] + dims[1], dims[2]];
    if ([qk, v].some((width) => width < data.step || width > data.widest || width % data.step)) return null;
    const place = (qk / data.step - 1) * (data.widest / data.step) + v / data.step - 1;
    const [ranked, source, kernels] = data.others[arch];
    return [ranked, source, kernels.map(([grid, records]) => records[grids(grid)[place]])];
  }

  const expanded = [];
  function grids(number) {
    return (expanded[number] ||= data.grids[number].split(" ").flatMap((run) => {
      const [which, length] = run.split("x").map(Number);
      return Array(length).fill(which);
    }));
  }

  /* Everything against one kernel, and how it would run. */
  function judge(record, question, asked = false) {
    const pin = question.fa_version === null ? 0 : 1 + data.fa_versions.indexOf(question.fa_version);
    const [always, missing, free, offers, cure] = data.variants[record[5][data.dtypes.indexOf(question.dtype)]];
    let [reasons, notes, runs, provider] = [missing, [], record[3], null];
    if (question.installed === null) {
      [reasons, notes, runs] = free;
    } else {
      const against = [];
      let installed = false;
      for (const [number, versions] of offers) {
        const [name, known] = data.packages[number];
        if (!(name in question.installed)) continue;
        installed = true;
        const state = data.states[versions[known.indexOf(question.installed[name])]];
        if (state[0]) {
          [, reasons, notes, runs] = state;
          provider = name;
          break;
        }
        against.push(...state[1]);
      }
      if (installed && provider === null) reasons = against;
    }
    const all = [...(asked ? [] : record[4][pin]), ...always, ...reasons].map((number) => data.reasons[number]);
    return { record, reasons: all, notes: notes.map(string), runs, provider, cure };
  }

  function answer(question) {
    const found = cells(question.arch, question.dims);
    if (!found) return null;
    const [ranked, source, numbers] = found;
    const judged = numbers.map((number) => judge(data.records[number], question));
    const eligible = judged.filter((one) => !one.reasons.length);
    const best = eligible[0];
    const shown = [...eligible, ...judged.filter((one) => one.reasons.length)].map((one) => ({
      ...candidate(one),
      verdict: one === best ? "chosen" : one.reasons.length ? "rejected" : "eligible",
      reasons: one.reasons.map((reason) => worded(reason, question)).concat(
        one.reasons.length || one === best ? [] : later(one, best, question.arch, source)),
    }));
    return {
      chosen: best ? { ...candidate(best), provider: best.provider } : null,
      candidates: shown,
      hints: hints(question, judged, best, ranked),
      order: source < 0 ? null : string(source),
    };
  }

  function candidate({ record, notes, runs }) {
    const [kernel, backend, fa_version] = kernelOf(record);
    const [proof, requires] = runs;
    return { backend, kernel, fa_version, pad_v_to: record[1] || null, requires: requires.map(string),
      proof: string(proof), notes, row: string(record[2]) };
  }

  function worded([code, text, source], { arch, dims }) {
    const values = { arch, dims: dimsText(dims), pair: `(qk ${dims[0] + dims[1]}, v ${dims[2]})` };
    return { code, message: fill(string(text), values), source: source < 0 ? null : string(source) };
  }

  function later(one, best, arch, source) {
    const values = { kernel: kernelOf(one.record)[0], chosen: kernelOf(best.record)[0], arch };
    const message = fill(texts["lower-priority"], values);
    return [{ code: "lower-priority", message, source: source < 0 ? null : string(source) }];
  }

  /* What would help, best candidate first: each of these was tried by the engine, or is tried here with its answers. */
  function hints(question, judged, best, ranked) {
    const place = best ? judged.indexOf(best) : ranked;
    const better = place < ranked ? judged.slice(0, place) : judged;
    const found = better.filter((one) => one.reasons.length).map((one) => help(question, one)).filter(Boolean);
    if (!best && !blockOf(question.dims)) found.push(...nearest(question));
    return found.slice(0, data.max_hints);
  }

  function help(question, one) {
    const label = labelOf(kernelOf(one.record));
    const all = one.reasons.map(([code]) => code);
    const codes = new Set(all.filter((code) => code !== "not-requested"));
    const asking = codes.size < new Set(all).size;
    if (!codes.size) return fill(texts.ask, { label });
    if (question.installed && one.cure >= 0 && [...codes].every((code) => data.cured.includes(code))) {
      return fill(asking ? texts.ask_install : texts.install, { label, requirement: string(one.cure) });
    }
    if (codes.size > 1 || !codes.has("dtype-unsupported")) return null;
    const dtypes = one.runs[2].map((number) => data.dtypes[number]);
    const dtype = dtypes.find((other) => !judge(one.record, { ...question, dtype: other }, asking).reasons.length);
    return dtype ? fill(asking ? texts.ask_dtype : texts.dtype, { label, dtype }) : null;
  }

  function nearest(question) {
    const far = (dims) => dims.reduce((sum, width, i) => sum + Math.abs(width - question.dims[i]), 0);
    const names = Object.keys(data.blocks).sort((one, other) => far(data.blocks[one]) - far(data.blocks[other]));
    const block = names.find((name) => answer({ ...question, dims: data.blocks[name] }).chosen);
    const values = { block, near: block && dimsText(data.blocks[block]), dims: dimsText(question.dims) };
    return block ? [fill(texts.nearest, values)] : [];
  }

  // ---- question <-> address -----------------------------------------------------------------------------------------

  const fold = (name) => name.toLowerCase().replace(/[^a-z0-9.]/g, "");
  const targets = new Map();
  for (const [arch, [, products, spellings]] of Object.entries(data.architectures)) {
    for (const name of [...products, ...spellings, arch]) targets.set(fold(name), arch);
  }
  const models = new Map(Object.entries(data.models).map(([name, dims]) => [fold(name), dims]));

  /* A state is the question as it was typed: target and package versions may name what nobody exported. */
  const START = { target: "H200", dims: [64, 64, 128], dtype: data.dtypes[0], fa_version: null, installed: null };

  function read(hash) {
    const given = new URLSearchParams(hash.replace(/^#/, ""));
    const state = { ...START };
    if (given.has("gpu")) state.target = given.get("gpu");
    const dims = (given.get("dims") || "").split(",").map(Number);
    const named = models.get(fold(given.get("model") || ""));
    if (dims.length === 3 && dims.every((width) => Number.isInteger(width) && width >= 0)) state.dims = dims;
    else if (named) state.dims = named;
    if (data.dtypes.includes(given.get("dtype"))) state.dtype = given.get("dtype");
    if (data.fa_versions.includes(Number(given.get("fa")))) state.fa_version = Number(given.get("fa"));
    if (given.has("installed")) {
      const pairs = given.get("installed").split(",").filter(Boolean).map((text) => text.split("=="));
      state.installed = Object.fromEntries(pairs.map(([name, version]) => [name, version || ""]));
    }
    return state;
  }

  function address(state) {
    const parts = [`gpu=${encodeURIComponent(state.target)}`, `dims=${state.dims.join(",")}`];
    if (state.dtype !== START.dtype) parts.push(`dtype=${state.dtype}`);
    if (state.fa_version !== null) parts.push(`fa=${state.fa_version}`);
    if (state.installed) parts.push(`installed=${pinned(state.installed).map(encodeURIComponent).join(",")}`);
    return "#" + parts.join("&");
  }

  const pinned = (installed) => Object.entries(installed).map(([name, version]) => `${name}==${version}`);

  /* The question to look up, or why it has to be asked elsewhere. */
  function understood(state) {
    const arch = targets.get(fold(state.target));
    if (!arch) return { problem: `No architecture or GPU here is called "${state.target}".` };
    const odd = Object.entries(state.installed || {}).find(([name, version]) => !packages.get(name)?.includes(version));
    if (odd) return { problem: `This page has no answer for ${odd.join(" ")}; the command line has.`, arch };
    const question = { arch, dims: state.dims, dtype: state.dtype, fa_version: state.fa_version,
      installed: state.installed };
    if (state.dims[0] + state.dims[1] === 0 || state.dims[2] === 0) return { problem: "A head cannot be 0 wide." };
    if (!cells(arch, state.dims)) {
      const known = `multiples of ${data.step} up to ${data.widest}`;
      return { problem: `This page has answers for qk (nope + rope) and v that are ${known}; the command line for all.`,
        arch };
    }
    return { question, arch };
  }

  function command(state) {
    const words = ["mla-prefill select", data.architectures[state.target] ? "--arch" : "--gpu"];
    words.push(/^[\w.:+-]+$/.test(state.target) ? state.target : `'${state.target.replace(/'/g, "")}'`);
    words.push("--dims", state.dims.join(","));
    if (state.dtype !== START.dtype) words.push("--dtype", state.dtype);
    if (state.fa_version !== null) words.push("--fa-version", state.fa_version);
    for (const pair of pinned(state.installed || {})) words.push("--installed", pair);
    return [...words, "--explain"].join(" ");
  }

  // ---- the page -----------------------------------------------------------------------------------------------------

  const at = (id) => document.getElementById(id);

  /* An element: make("p", {class: "x"}, "text", child). Text is never markup. */
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  function sourceLink(source) {
    const match = /^capabilities\/data\/(\w+\.yaml):(\d+)$/.exec(source || "");
    if (!match) return source ? make("span", { class: "source" }, source) : null;
    return make("a", { class: "source", href: `source/${match[1]}.html#L${match[2]}` }, `${match[1]}:${match[2]}`);
  }

  let state = read(location.hash);

  function change(changes) {
    state = { ...state, ...changes };
    const hash = address(state);
    if (hash !== location.hash) history.replaceState(null, "", hash);
    show();
  }

  function show() {
    const { question, problem } = understood(state);
    const found = question ? answer(question) : null;
    at("answer").replaceChildren(...(found ? story(question, found) : refusal(problem)));
    performance.mark("answered");
    drawMap(question);
  }

  function refusal(problem) {
    return [make("h2", {}, "Not answered here"), make("p", { class: "problem" }, problem), asking()];
  }

  const asking = () => make("p", { class: "command" }, make("code", {}, command(state)));

  function story(question, found) {
    const { chosen } = found;
    const where = `${dimsText(question.dims)}${named(question.dims)}, ${question.dtype}, on ${question.arch}`;
    const parts = [make("p", { class: "where" }, where)];
    if (chosen) {
      parts.push(make("h2", { class: `chosen ${chosen.backend}` }, `${chosen.backend} / ${chosen.kernel}`), facts(chosen));
    } else {
      parts.push(make("h2", { class: "chosen none" }, "No backend is eligible"));
    }
    if (found.hints.length) {
      parts.push(make("h3", {}, chosen ? "What would be better" : "What would help"));
      parts.push(make("ul", { class: "hints" }, ...found.hints.map((hint) => make("li", {}, hint))));
    }
    parts.push(make("h3", {}, "Turned down"), turnedDown(found), ...measured(question));
    return [...parts, make("h3", {}, "The same question on the command line"), asking()];
  }

  function named(dims) {
    const block = blockOf(dims);
    return block ? ` (${block})` : "";
  }

  function facts(chosen) {
    const rows = [
      ["FlashAttention", chosen.fa_version],
      ["package", chosen.provider && `${chosen.provider} ${state.installed[chosen.provider]}`],
      ["requires", chosen.requires.join(", ")],
      ["V", chosen.pad_v_to ? `zero-padded to ${chosen.pad_v_to}` : "as it is"],
      ["proof", make("a", { href: "../concepts.html#proof-levels" }, chosen.proof)],
      ["row", sourceLink(chosen.row)],
      ["warning", chosen.notes.join("; ")],
    ];
    const kept = rows.filter(([, value]) => value);
    return make("dl", {}, ...kept.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  function turnedDown({ candidates }) {
    const rest = candidates.filter(({ verdict }) => verdict !== "chosen");
    return make("ul", { class: "candidates" }, ...rest.map(({ backend, kernel, verdict, proof, reasons, notes, pad_v_to }) =>
      make("li", { class: verdict },
        make("b", {}, `${backend} / ${kernel}`), " ",
        make("small", {}, [verdict, pad_v_to && `V to ${pad_v_to}`, proof !== "source" && proof].filter(Boolean).join(", ")),
        make("ul", {}, ...reasons.map(({ code, message, source }) => make("li", {},
          make("a", { class: "code", href: "../codes.html#reasons", title: data.meanings[code] }, code),
          ` ${message} `, sourceLink(source))), ...notes.map((note) => make("li", {}, note))))));
  }

  function measured({ arch, dims }) {
    return data.profiles.filter((profile) => profile.arch === arch && dimsText(dims) in profile.times).flatMap((profile) => {
      const shapes = profile.times[dimsText(dims)];
      const kernels = [...new Set(Object.values(shapes).flatMap(Object.keys))];
      const versions = Object.entries(profile.packages).map((pair) => pair.join(" ")).join(", ");
      const rows = Object.entries(shapes).map(([shape, speeds]) => make("tr", {}, make("th", { scope: "row" }, shape),
        ...kernels.map((kernel) => speed(speeds, kernel))));
      return [
        make("h3", {}, `Measured on ${profile.gpu || profile.arch}`),
        make("details", { open: true },
          make("summary", {}, `TFLOP/s, eager / in a CUDA graph, causal, ${profile.dtype}, ${profile.date}`),
          make("p", {}, versions),
          make("div", { class: "scroll" }, make("table", { class: "measured" },
            make("thead", {}, make("tr", {}, make("th", {}, "sequences x tokens"),
              ...kernels.map((kernel) => make("th", { scope: "col" }, kernel)))),
            make("tbody", {}, ...rows)))),
      ];
    });
  }

  function speed(speeds, kernel) {
    if (!speeds[kernel]) return make("td", {}, "");
    const [eager, graph] = speeds[kernel];
    const best = Math.max(...Object.values(speeds).map((pair) => pair[0]));
    return make("td", { class: eager === best ? "best" : null }, `${eager} / ${graph ?? "-"}`);
  }

  // ---- heat map -----------------------------------------------------------------------------------------------------

  function drawMap(current) {
    const arches = Object.keys(data.architectures);
    const open = { dtype: state.dtype, fa_version: state.fa_version, installed: state.installed };
    const known = !understood({ ...START, ...open }).problem;
    const focused = document.activeElement?.dataset?.cell;
    const head = make("tr", {}, make("th", {}, "dims"), ...arches.map((arch) => make("th", { scope: "col",
      title: data.architectures[arch].slice(0, 2).flat().join(", ") }, arch)));
    const rows = Object.entries(data.blocks).map(([block, dims]) => make("tr", {},
      make("th", { scope: "row", title: block }, block, make("small", {}, ` ${dims.join(", ")}`)),
      ...arches.map((arch) => {
        const found = known ? answer({ arch, dims, ...open }) : null;
        return mapCell(arch, block, dims, found, current && current.arch === arch && blockOf(current.dims) === block);
      })));
    at("map").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
    const cell = at("map").querySelector("[aria-current]") || at("map").querySelector("button");
    cell.tabIndex = 0;
    if (focused) at("map").querySelector(`[data-cell="${focused}"]`)?.focus();
  }

  function mapCell(arch, block, dims, found, here) {
    const chosen = found?.chosen;
    const pad = chosen?.pad_v_to ? `, V padded to ${chosen.pad_v_to}` : "";
    const proof = chosen ? `, proof: ${chosen.proof}` : "";
    const what = chosen ? `${chosen.backend} / ${chosen.kernel}${pad}${proof}` : found ? "no backend" : "not answered here";
    const tip = `${block} ${dimsText(dims)} on ${arch}: ${what}`;
    const tell = () => { at("tip").textContent = tip; };
    return make("td", {}, make("button", { type: "button", tabindex: -1, "data-cell": `${arch} ${block}`, "aria-label": tip,
      "aria-current": here ? "true" : null, class: chosen ? chosen.backend : "none", mouseenter: tell, focus: tell,
      click: () => { const target = arch; change({ target, dims }); fillForm(); at("answer").scrollIntoView(); } },
      ...(chosen ? breakable(chosen.kernel) : ["-"]), chosen?.pad_v_to ? make("sup", {}, "V") : null));
  }

  /* A name that may break after its underscores. */
  const breakable = (name) => name.split(/(?<=_)/).flatMap((part) => [part, make("wbr")]);

  function moveInMap(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const cell = event.target.closest("td");
    if (!cell || !(event.key in steps)) return;
    event.preventDefault();
    const [down, right] = steps[event.key];
    const row = cell.parentElement.parentElement.rows[cell.parentElement.sectionRowIndex + down];
    const next = row?.cells[cell.cellIndex + right]?.querySelector("button");
    if (!next) return;
    at("map").querySelectorAll("button[tabindex='0']").forEach((button) => { button.tabIndex = -1; });
    next.tabIndex = 0;
    next.focus();
  }

  // ---- form ---------------------------------------------------------------------------------------------------------

  function buildForm() {
    const options = (names) => names.map((name) => make("option", { value: name }));
    const products = Object.entries(data.architectures).flatMap(([arch, [, names]]) => [...names, arch]);
    at("targets").append(...options(products));
    at("models").append(...options(Object.keys(data.models)));
    at("dtype").append(...data.dtypes.map((name) => make("option", {}, name)));
    for (const version of ["", ...data.fa_versions]) {
      at("pins").append(make("label", {}, make("input", { type: "radio", name: "fa", value: version,
        change: () => change({ fa_version: version || null }) }), ` ${version || "any"}`));
    }
    for (const [name, versions] of data.packages) {
      at("packages").append(make("label", {}, name, make("select", { "data-package": name, change: readPackages },
        make("option", { value: "" }, "not installed"), ...versions.map((version) => make("option", {}, version)))));
    }
    at("question").addEventListener("submit", (event) => event.preventDefault());
    at("target").addEventListener("input", () => change({ target: at("target").value }));
    at("dtype").addEventListener("change", () => change({ dtype: at("dtype").value }));
    at("model").addEventListener("input", () => {
      const dims = models.get(fold(at("model").value));
      if (dims) { change({ dims }); fillDims(); }
    });
    for (const id of ["nope", "rope", "v"]) at(id).addEventListener("input", readDims);
    at("constrained").addEventListener("change", readPackages);
    at("map").addEventListener("keydown", moveInMap);
    addEventListener("hashchange", () => { state = read(location.hash); fillForm(); show(); });
    at("fingerprint").textContent = data.fingerprint.slice(0, 16);
  }

  function readDims() {
    const dims = ["nope", "rope", "v"].map((id) => at(id).valueAsNumber);
    at("model").value = "";
    if (dims.every((width) => Number.isInteger(width) && width >= 0)) change({ dims });
  }

  function readPackages(event) {
    const selects = [...document.querySelectorAll("[data-package]")];
    if (event.target.dataset.package) at("constrained").checked = true;
    const chosen = selects.filter((select) => select.value).map((select) => [select.dataset.package, select.value]);
    change({ installed: at("constrained").checked ? Object.fromEntries(chosen) : null });
    summarise();
  }

  function summarise() {
    at("installed-summary").textContent = state.installed === null ? "no constraint"
      : pinned(state.installed).join(", ") || "none";
  }

  function fillDims() {
    ["nope", "rope", "v"].forEach((id, i) => { at(id).value = state.dims[i]; });
  }

  function fillForm() {
    at("target").value = state.target;
    at("model").value = blockOf(state.dims) || "";
    at("dtype").value = state.dtype;
    document.querySelector(`#pins [value="${state.fa_version ?? ""}"]`).checked = true;
    at("constrained").checked = state.installed !== null;
    document.querySelectorAll("[data-package]").forEach((select) => {
      select.value = state.installed?.[select.dataset.package] ?? "";
    });
    at("installed").open = state.installed !== null;
    fillDims();
    summarise();
  }

  buildForm();
  fillForm();
  show();
  return { answer, read, address, command };
})();
