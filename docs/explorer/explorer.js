/* The matrix explorer. It looks up what the engine said (the page's data, written by export.py) and knows no limit of
   any kernel. A question is {arch, device: null or a GPU, dims: [qk_nope, qk_rope, v_head], dtype, fa_version: null or
   a number, needs: [feature], prefers: [feature, most wanted first], installed: null or {distribution: version},
   policy, shape: null or {sequences, length, heads, graph}}; it stands in the address after #. */
"use strict";

const explorer = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const texts = data.texts;
  const string = (number) => data.strings[number];
  const fill = (text, values) => text.replace(/\{(\w+)\}/g, (all, name) => (name in values ? values[name] : all));
  const packages = new Map(data.packages);
  const kernelOf = (record) => data.kernels[record[0]];
  const labelOf = (kernel) => `${kernel[1]}/${kernel[0]}`;
  const features = data.features.map(([name]) => name);
  const lackedIn = (mask, feature) => mask >> features.indexOf(feature) & 1;
  const dimsText = (dims) => `(${dims.join(", ")})`;
  const blocks = new Map(Object.entries(data.blocks).map(([name, dims]) => [dimsText(dims), name]));
  const blockOf = (dims) => blocks.get(dimsText(dims));

  // ---- the answer ---------------------------------------------------------------------------------------------------

  /* [kernels with a place in the order, where the order stands, records best first]. */
  function cells(arch, dims) {
    const block = blockOf(dims);
    if (block) return data.cells[arch][block];
    const [qk, v] = [dims[0] + dims[1], dims[2]];
    const [ranked, source, kernels] = data.others[arch];
    return [ranked, source, kernels.map(([tree, records, proven]) =>
      proven[`${qk} ${v}`] ?? records[region(data.trees[tree], qk, v)])];
  }

  /* The region of the plane in which these widths lie: down a tree of [condition, where it holds, where not]. */
  function region(tree, qk, v) {
    while (Array.isArray(tree)) {
      const [a, b, n, kind] = data.conditions[tree[0]];
      const total = a * qk + b * v;
      tree = (kind === "<" ? total < n : total % n === 0) ? tree[1] : tree[2];
    }
    return tree;
  }

  /* Everything against one kernel, and how it would run. */
  function judge(record, question, asked = false) {
    const pin = question.fa_version === null ? 0 : 1 + data.fa_versions.indexOf(question.fa_version);
    const lacking = record[5].filter((feature) => question.needs.includes(data.features[feature][0]));
    const of_needs = data.deciding.reduce((sum, feature, i) =>
      sum + (question.needs.includes(data.features[feature][0]) ? 2 ** i : 0), 0);
    const variant = data.variants[record[7][data.dtypes.indexOf(question.dtype)][of_needs]];
    const [always, missing, free, freeLacking, offers, cure] = variant;
    let [reasons, notes, runs, provider] = [missing, [], record[3], null];
    if (question.installed === null && lacking.length) {
      reasons = freeLacking;
    } else if (question.installed === null) {
      [reasons, notes, runs] = free;
    } else {
      const against = [];
      let installed = false;
      for (const [number, versions] of offers) {
        const [name, known] = data.packages[number];
        if (!(name in question.installed)) continue;
        installed = true;
        const state = data.states[versions[known.indexOf(question.installed[name])]];
        if (state[0] && !lacking.length) {
          [, reasons, notes, runs] = state;
          provider = name;
          break;
        }
        against.push(...state[1]);
      }
      if (installed && provider === null) reasons = against;
    }
    const found = (numbers) => numbers.map((number) => data.reasons[number]);
    const own = found([...(asked ? [] : record[4][pin]), ...always, ...(lacking.length ? [record[6]] : [])]);
    const stated = (code) => lacking.length && code === data.reasons[record[6]][0];
    const all = [...own, ...found(reasons).filter(([code]) => !stated(code))];
    return { record, reasons: all, notes: notes.map(string), runs, provider, cure: lacking.length ? -1 : cure,
      lacking: lacking.map((feature) => data.features[feature][0]), granted: [] };
  }

  /* An eligible kernel as it provides what is preferred, where needing that as well leaves it eligible. */
  function granting(one, question) {
    return question.prefers.reduce((so_far, wish) => {
      const granted = [...so_far.granted, wish];
      const needing = judge(one.record, { ...question, needs: [...question.needs, ...granted] });
      return needing.reasons.length ? so_far : { ...needing, granted };
    }, one);
  }

  function answer(question) {
    const [ranked, source, numbers] = cells(question.arch, question.dims);
    const judged = numbers.map((number) => judge(data.records[number], question)).map((one) =>
      (one.reasons.length ? one : granting(one, question)));
    const inOrder = judged.filter((one) => !one.reasons.length);
    const [eligible, from, notes] = question.policy === "measured" ? byTime(inOrder, question, source)
      : [inOrder, source < 0 ? null : string(source), []];
    // The one exception to the order: what provides a preferred feature comes first, the most wanted one deciding.
    for (const wish of [...question.prefers].reverse()) {
      eligible.sort((one, other) => other.granted.includes(wish) - one.granted.includes(wish));
    }
    const rejected = judged.filter((one) => one.reasons.length);
    const best = eligible[0];
    const unmet = best ? question.prefers.filter((wish) => !best.granted.includes(wish)) : [];
    const dtype = best && computesIn(best, question);
    const shown = [...eligible, ...rejected].map((one) => ({
      ...candidate(one, question.dims),
      verdict: one === best ? "chosen" : one.reasons.length ? "rejected" : "eligible",
      reasons: one.reasons.map((reason) => worded(reason, question, one)).concat(
        one.reasons.length || one === best ? [] : later(one, best, question, from)),
    }));
    return {
      chosen: best ? { ...candidate(best, question.dims), provider: best.provider } : null,
      candidates: shown,
      notes,
      compute_dtype: dtype || null,
      unmet,
      warnings: [...(best ? best.notes : []),
        ...unmet.map((wish) => whyUnmet(wish, question, [...eligible, ...rejected]))],
      hints: hints(question, judged, best, unmet, ranked),
    };
  }

  /* Some features have a kernel compute in another dtype than that of the request. */
  function computesIn({ granted }, { needs, dtype }) {
    const other = [...needs, ...granted].map((name) => data.features[features.indexOf(name)][2]).find(Boolean);
    return other || dtype;
  }

  /* Why the best does without a preferred feature: the reasons against each kernel that can provide it at all. */
  function whyUnmet(wish, question, [best, ...rest]) {
    const before = best.granted.filter((other) => question.prefers.indexOf(other) < question.prefers.indexOf(wish));
    const needing = { ...question, needs: [...question.needs, ...before, wish] };
    const against = [best, ...rest].filter(({ record }) => !lackedIn(kernelOf(record)[3], wish)).flatMap((one) => {
      const refused = one.reasons.length ? one : judge(one.record, needing);
      return refused.reasons.map((reason) => worded(reason, question, refused).message);
    });
    const stays = data.features[features.indexOf(wish)][2]
      ? fill(texts.stays, { dtype: computesIn(best, question) }) : "";
    const [label, dims] = [labelOf(kernelOf(best.record)), dimsText(question.dims)];
    const why = against.join("; ") || texts.nobody;
    return fill(texts.unmet, { wish, label, dims, arch: question.arch, stays, why });
  }

  /* The order by a timing profile; the engine worked it out for every set of kernels that can be eligible together. */
  function byTime(eligible, question, source) {
    const standing = source < 0 ? null : string(source);
    if (!eligible.length) return [eligible, standing, []];
    const [unnamed, named, of_device] = data.devices[question.arch];
    const against = [];
    for (const number of of_device[products.get(foldProduct(question.device || "")) || ""] || []) {
      const profile = data.profiles[number];
      const why = mismatch(profile, eligible, question);
      if (!why) return timed(profile, eligible, question);
      against.push(`${profile.label} ${why}`);
    }
    const why = against.join("; ") || fill(question.device ? named : unnamed, { device: question.device });
    return [eligible, standing, [fill(texts.default_order, { why })]];
  }

  /* Why the times of a profile do not count; undefined where they do. */
  function mismatch(profile, eligible, { dims, dtype, shape, installed }) {
    if (profile.other_dtypes[dtype]) return profile.other_dtypes[dtype];
    const graph = shape?.graph ? 1 : 0;
    const timed = profile.timed[dimsText(dims)]?.[graph] || [];
    const concerned = eligible.filter(({ record }) => timed.includes(kernelOf(record)[0]));
    if (!concerned.length) return fill(profile.no_times[graph], { dims: dimsText(dims) });
    return concerned.filter(({ provider }) => provider).map(({ record, provider }) =>
      profile.mismatches[kernelOf(record)[0]][provider]?.[installed[provider]]).find(Boolean);
  }

  function timed(profile, eligible, { dims, shape, installed }) {
    const names = eligible.map(({ record }) => kernelOf(record)[0]);
    const [best, note, differing] = profile.orders[dimsText(dims)][shapeText(shape)];
    const known = names.filter((name) => profile.timed[dimsText(dims)][shape?.graph ? 1 : 0].includes(name)).sort();
    const [order, said] = differing[known.join(" ")] || [best, note];
    const place = (one) => (order.indexOf(kernelOf(one.record)[0]) + 1 || Infinity);
    const sorted = [...eligible].sort((one, other) => (place(one) === place(other) ? 0 : place(one) - place(other)));
    const packages = [...new Set(known.map((name) => profile.providers[name]))].sort().map((name) =>
      `${name} ${profile.packages[name]}`).join(", ");
    const values = { note: profile.notes[said], packages };
    return [sorted, profile.label, [installed === null ? fill(texts.timed_with, values) : values.note]];
  }

  /* As it stands in the data and in front of people: 8x512x16 graph. */
  const shapeText = (shape) => (shape
    ? `${shape.sequences}x${shape.length}x${shape.heads}${shape.graph ? " graph" : ""}` : "");

  function candidate({ record, notes, runs }, dims) {
    const [kernel, backend, fa_version] = kernelOf(record);
    const [proof, requires, , proven] = runs;
    return { backend, kernel, fa_version, pad_v_to: record[1] ? dims[0] + dims[1] : null,
      requires: requires.map(string), proof: string(proof), proven: string(proven), notes, row: string(record[2]) };
  }

  function worded([code, text, source], { arch, dims }, { lacking }) {
    const pair = `(qk ${dims[0] + dims[1]}, v ${dims[2]})`;
    const values = { arch, dims: dimsText(dims), pair, missing: lacking.join(", ") };
    return { code, message: fill(string(text), values), source: source < 0 ? null : string(source) };
  }

  function later(one, best, { arch, prefers }, from) {
    const lacks = prefers.filter((wish) => best.granted.includes(wish) && !one.granted.includes(wish)).join(", ");
    const where = lacks ? fill(texts.preferred, { arch, lacks }) : arch;
    const values = { kernel: kernelOf(one.record)[0], chosen: kernelOf(best.record)[0], arch: where };
    return [{ code: "lower-priority", message: fill(texts["lower-priority"], values), source: lacks ? null : from }];
  }

  /* What would help: what was asked for, then best candidate first, and one change once. Each of these was tried by the
     engine, or is tried here with its answers. */
  function hints(question, judged, best, unmet, ranked) {
    const place = best ? judged.indexOf(best) : ranked;
    const wanted = ({ runs }) => unmet.some((wish) => !lackedIn(runs[4], wish));
    const unasked = ({ reasons }) => reasons.some(([code]) => code === "not-requested");
    const better = (place < ranked ? judged.filter((one, i) => i < place || wanted(one)) : [...judged])
      .sort((one, other) => unasked(one) - unasked(other));
    const found = unmet.map((wish) => installFor(question, best, wish, unmet));
    found.push(...better.filter((one) => one.reasons.length).map((one) => help(question, one)));
    if (!best && !blockOf(question.dims)) found.push(...nearest(question));
    const distinct = new Map();
    for (const [text, change] of found.filter(Boolean)) if (!distinct.has(change)) distinct.set(change, text);
    return [...distinct.values()].slice(0, data.max_hints);
  }

  /* [text, the change that it proposes]: one that asks for a kernel is that kernel's own. */
  function hint(text, values, label) {
    const told = fill(text, { ...values, label });
    return [told, text.startsWith("ask") ? told : fill(text, { ...values, label: "" })];
  }

  /* The install by which the best kernel itself would provide a wish. */
  function installFor(question, best, wish, unmet) {
    const earlier = question.prefers.slice(0, question.prefers.indexOf(wish)).filter((other) => !unmet.includes(other));
    const needing = { ...question, needs: [...question.needs, ...earlier, wish] };
    const again = judge(best.record, needing);
    const requirement = cure(needing, again, again.reasons.map(([code]) => code));
    return requirement && hint(texts.install, { requirement }, labelOf(kernelOf(best.record)));
  }

  function cure(question, one, codes) {
    const cured = codes.length && codes.every((code) => data.cured.includes(code));
    return question.installed && one.cure >= 0 && cured ? string(one.cure) : null;
  }

  function help(question, one) {
    const label = labelOf(kernelOf(one.record));
    const all = one.reasons.map(([code]) => code);
    const codes = new Set(all.filter((code) => code !== "not-requested"));
    const asking = codes.size < new Set(all).size;
    if (!codes.size) return hint(texts.ask, {}, label);
    const requirement = cure(question, one, [...codes]);
    if (requirement) return hint(asking ? texts.ask_install : texts.install, { requirement }, label);
    if (codes.size > 1) return null;
    if (codes.has("feature-missing") && one.lacking.length) {
      const needs = question.needs.filter((need) => !one.lacking.includes(need));
      const missing = one.lacking.join(", ");
      const works = !judge(one.record, { ...question, needs }, asking).reasons.length;
      return works ? hint(asking ? texts.ask_without : texts.without, { missing }, label) : null;
    }
    if (!codes.has("dtype-unsupported")) return null;
    const dtypes = one.runs[2].map((number) => data.dtypes[number]);
    const dtype = dtypes.find((other) => !judge(one.record, { ...question, dtype: other }, asking).reasons.length);
    return dtype ? hint(asking ? texts.ask_dtype : texts.dtype, { dtype }, label) : null;
  }

  function nearest(question) {
    const far = (dims) => dims.reduce((sum, width, i) => sum + Math.abs(width - question.dims[i]), 0);
    const names = Object.keys(data.blocks).sort((one, other) => far(data.blocks[one]) - far(data.blocks[other]));
    const block = names.find((name) => answer({ ...question, dims: data.blocks[name] }).chosen);
    const values = { block, near: block && dimsText(data.blocks[block]), dims: dimsText(question.dims) };
    return block ? [hint(texts.nearest, values, "")] : [];
  }

  // ---- question <-> address -----------------------------------------------------------------------------------------

  const fold = (name) => name.toLowerCase().replace(/[^a-z0-9.]/g, "");
  const foldProduct = (name) => data.brands.reduce((rest, brand) => (rest.startsWith(brand)
    ? rest.slice(brand.length) : rest), fold(name));
  const arches = new Map();
  const products = new Map();
  for (const [arch, [, names, spellings]] of Object.entries(data.architectures)) {
    for (const name of [...spellings, arch]) arches.set(fold(name), arch);
    for (const name of names) { arches.set(fold(name), arch); products.set(fold(name), name); }
  }
  const archOf = (target) => arches.get(foldProduct(target)) || arches.get(fold(target.split(":")[0]));
  const deviceOf = (target) => (products.has(foldProduct(target)) ? target : null);
  const models = new Map(Object.entries(data.models).map(([name, dims]) => [fold(name), dims]));

  /* A state is the question as it was typed: target, widths and package versions may be what nobody can answer.
     `unread`: what an address says that means nothing here. */
  const START = { target: "H200", dims: [64, 64, 128], dtype: data.dtypes[0], fa_version: null, needs: [],
    prefers: [], installed: null, policy: "default", shape: null, unread: [] };

  /* A width as a number where it is one, however large; else the text. */
  function width(text) {
    if (!/^-?\d+$/.test(text.trim())) return text.trim();
    return Number.isSafeInteger(Number(text)) ? Number(text) : BigInt(text.trim());
  }

  function read(hash) {
    const given = new URLSearchParams(hash.replace(/^#/, ""));
    const state = { ...START, unread: [] };
    const take = (name, field, meaning) => {
      if (!given.has(name)) return;
      const value = meaning(given.get(name));
      if (value === undefined) state.unread.push(`${name}=${given.get(name)}`);
      else state[field] = value;
    };
    const oneOf = (values) => (text) => values.find((value) => String(value) === text);
    const listed = (text) => text.split(",").filter(Boolean);
    take("gpu", "target", (text) => text);
    take("model", "dims", (text) => models.get(fold(text)));
    take("dims", "dims", (text) => (text.split(",").length === 3 ? text.split(",").map(width) : undefined));
    take("dtype", "dtype", oneOf(data.dtypes));
    take("fa", "fa_version", oneOf(data.fa_versions));
    const known = (text) => (listed(text).every((name) => features.includes(name))
      ? [...new Set(listed(text))] : undefined);
    take("needs", "needs", (text) => known(text)?.sort());
    take("prefers", "prefers", (text) => known(text)?.filter((wish) => !state.needs.includes(wish)));
    take("installed", "installed", (text) => Object.fromEntries(listed(text).map((pair) => {
      const [name, version] = pair.split("==");
      return [name, version || ""];
    })));
    take("policy", "policy", oneOf(["default", "measured"]));
    if (state.policy === "measured") take("shape", "shape", (text) => shapeFrom(
      `${text}x${given.get("heads")}${given.has("graph") ? " graph" : ""}`));
    return state;
  }

  function shapeFrom(text) {
    const match = /^(\d+)x(\d+)x(\d+)( graph)?$/.exec(text);
    return match ? { sequences: +match[1], length: +match[2], heads: +match[3], graph: !!match[4] } : undefined;
  }

  function address(state) {
    const parts = [`gpu=${encodeURIComponent(state.target)}`, `dims=${state.dims.map(encodeURIComponent).join(",")}`];
    if (state.dtype !== START.dtype) parts.push(`dtype=${state.dtype}`);
    if (state.fa_version !== null) parts.push(`fa=${state.fa_version}`);
    if (state.needs.length) parts.push(`needs=${state.needs.join(",")}`);
    if (state.prefers.length) parts.push(`prefers=${state.prefers.join(",")}`);
    if (state.installed) parts.push(`installed=${pinned(state.installed).map(encodeURIComponent).join(",")}`);
    if (state.policy !== START.policy) parts.push(`policy=${state.policy}`);
    if (state.shape) parts.push(`shape=${state.shape.sequences}x${state.shape.length}`, `heads=${state.shape.heads}`);
    if (state.shape?.graph) parts.push("graph");
    return "#" + parts.join("&");
  }

  const pinned = (installed) => Object.entries(installed).map(([name, version]) => `${name}==${version}`);

  /* The question to look up, or why there is none. */
  function understood(state) {
    if (state.unread.length) return { problem: `Nothing here is meant by ${state.unread.join(", ")} in the address.` };
    const arch = archOf(state.target);
    if (!arch) return { problem: `No architecture or GPU here is called "${state.target}".` };
    const wrong = noDims(state.dims);
    if (wrong) return { problem: wrong };
    const odd = Object.entries(state.installed || {}).find(([name, version]) => !packages.get(name)?.includes(version));
    if (odd) return { problem: `This page has no answer for ${odd.join(" ")}; the command line has.` };
    const { dims, dtype, fa_version, needs, prefers, installed, policy, shape } = state;
    const question = { arch, device: deviceOf(state.target), dims, dtype, fa_version, needs, prefers, installed, policy,
      shape };
    const timed = shapesOf(question);
    if (shape && timed.length && !timed.includes(shapeText(shape))) {
      return { problem: `No batch of ${shapeText(shape)} was measured; the command line answers by the nearest one.` };
    }
    return { question };
  }

  /* What the engine says of widths that no head can have. */
  function noDims(dims) {
    const { names, most, outside, no_number, zero } = data.widths;
    for (const [i, value] of dims.entries()) {
      if (typeof value === "string") return fill(no_number, { name: names[i], value });
      if (value < 0 || value > most) return fill(outside, { name: names[i], value });
    }
    const [qk, v] = [dims[0] + dims[1], dims[2]];
    return qk === 0 || v === 0 ? fill(zero, { qk, v }) : null;
  }

  /* The shapes for which every profile of this GPU that knows these dims has an order. */
  function shapesOf({ arch, device, dims }) {
    const numbers = data.devices[arch][2][products.get(foldProduct(device || "")) || ""] || [];
    const orders = numbers.map((number) => data.profiles[number].orders[dimsText(dims)]).filter(Boolean);
    return Object.keys(orders[0] || {}).filter((shape) => shape && orders.every((known) => shape in known));
  }

  function command(state) {
    const words = ["mla-prefill select", archOf(state.target) && !deviceOf(state.target) ? "--arch" : "--gpu"];
    const quoted = (text) => (/^[\w.:+,-]+$/.test(text) ? text : `'${text.replace(/'/g, "")}'`);
    words.push(quoted(state.target), "--dims", quoted(state.dims.join(",")));
    if (state.dtype !== START.dtype) words.push("--dtype", state.dtype);
    if (state.fa_version !== null) words.push("--fa-version", state.fa_version);
    if (state.needs.length) words.push("--needs", state.needs.join(","));
    if (state.prefers.length) words.push("--prefers", state.prefers.join(","));
    const installed = pinned(state.installed || {});
    if (state.installed && !installed.length) installed.push("none");
    for (const pair of installed) words.push("--installed", quoted(pair));
    if (state.policy !== START.policy) words.push("--policy", state.policy);
    if (state.shape) {
      const { sequences, length, heads, graph } = state.shape;
      words.push("--shape", `${sequences}x${length}`, "--heads", heads, ...(graph ? ["--graph"] : []));
    }
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
    if (!match) return source ? make("span", { class: "source", title: source }, source.split("/").pop()) : null;
    return make("a", { class: "source", href: `source/${match[1]}.html#L${match[2]}` }, `${match[1]}:${match[2]}`);
  }

  let state = read(location.hash);

  function change(changes) {
    state = { ...state, unread: [], ...changes };
    const hash = address(state);
    if (hash !== location.hash) history.replaceState(null, "", hash);
    show();
    drawMap();
  }

  function show() {
    const { question, problem } = understood(state);
    at("answer").replaceChildren(...(question ? story(question, answer(question)) : refusal(problem)));
    performance.mark("answered");
    fillShapes(question);
  }

  function refusal(problem) {
    const title = noDims(state.dims) === problem ? "These cannot be head dims" : "Not answered here";
    return [make("h2", {}, title), make("p", { class: "problem" }, problem), asking()];
  }

  function asking() {
    const words = command(state).split(/ (?=--)/).flatMap((word) => [" ", make("span", {}, word)]).slice(1);
    const line = make("code", {}, ...words);  // lines break between options, never within "--"
    const copy = (event) => {
      navigator.clipboard?.writeText(line.textContent).then(() => { event.target.textContent = "Copied"; });
      getSelection().selectAllChildren(line);
    };
    return make("div", { class: "command" }, line, make("button", { type: "button", click: copy }, "Copy"));
  }

  function story(question, found) {
    const { chosen } = found;
    const device = question.device ? ` (${question.device})` : "";
    const wanted = ["needs", "prefers"].filter((how) => question[how].length).map((how) =>
      `, ${how} ${question[how].join(", ")}`).join("");
    const dims = `${dimsText(question.dims)}${named(question.dims)}`;
    const where = `${dims}, ${question.dtype}${wanted}, on ${question.arch}${device}`;
    const parts = [make("p", { class: "where" }, where)];
    if (chosen) {
      const title = `${chosen.backend} / ${chosen.kernel}`;
      parts.push(make("h2", { class: `chosen ${chosen.backend}` }, title), facts(found));
    } else {
      parts.push(make("h2", { class: "chosen none" }, "No backend is eligible"));
    }
    parts.push(...found.notes.map((note) => make("p", { class: "note" }, note)));
    parts.push(...found.warnings.map((warning) => make("p", { class: "warning" }, warning)));
    if (found.hints.length) {
      parts.push(make("h3", {}, chosen ? "What would be better" : "What would help"));
      parts.push(make("ul", { class: "hints" }, ...found.hints.map((hint) => make("li", {}, hint))));
    }
    parts.push(make("h3", {}, "The same question on the command line"), asking());
    return [...parts, make("h3", {}, "Turned down"), turnedDown(found), ...measured(question)];
  }

  function named(dims) {
    const block = blockOf(dims);
    return block ? ` (${block})` : "";
  }

  function facts({ chosen, compute_dtype }) {
    const rows = [
      ["FlashAttention", chosen.fa_version],
      ["package", chosen.provider && `${chosen.provider} ${state.installed[chosen.provider]}`],
      ["requires", chosen.requires.join(", ")],
      ["computes in", compute_dtype],
      ["V", chosen.pad_v_to ? `zero-padded to ${chosen.pad_v_to}` : "as it is"],
      ["proof", make("span", {}, make("a", { href: "../concepts.html#proof-levels" }, chosen.proof),
        chosen.proven ? ` (${chosen.proven})` : "")],
      ["row", sourceLink(chosen.row)],
    ];
    const kept = rows.filter(([, value]) => value);
    return make("dl", {}, ...kept.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  }

  function turnedDown({ candidates }) {
    const rest = candidates.filter(({ verdict }) => verdict !== "chosen");
    return make("ul", { class: "candidates" }, ...rest.map((
      { backend, kernel, verdict, proof, reasons, notes, pad_v_to }) => make("li", { class: verdict },
        make("div", {}, make("b", {}, ...breakable(`${backend} / ${kernel}`)), " ", make("small", {},
          [verdict, pad_v_to && `V to ${pad_v_to}`, proof !== "source" && proof].filter(Boolean).join(", "))),
        make("ul", {}, ...reasons.map(({ code, message, source }) => make("li", {},
          make("a", { class: "code", href: "../codes.html#reasons", title: data.meanings[code] }, code),
          ` ${message} `, sourceLink(source))), ...notes.map((note) => make("li", {}, note))))));
  }

  function measured({ arch, dims }) {
    const here = data.profiles.filter((profile) => profile.arch === arch && dimsText(dims) in profile.times);
    return here.flatMap((profile) => {
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

  function drawMap() {
    const names = Object.keys(data.architectures);
    const current = understood(state).question;
    const focused = document.activeElement?.dataset?.cell;
    const head = make("tr", {}, make("th", {}, "dims"), ...names.map((arch) => make("th", { scope: "col",
      title: data.architectures[arch].slice(0, 2).flat().join(", ") }, arch)));
    const rows = Object.entries(data.blocks).map(([block, dims]) => make("tr", {},
      make("th", { scope: "row", title: block }, block, make("small", {}, ` ${dims.join(", ")}`)),
      ...names.map((arch) => {
        const target = archOf(state.target) === arch ? state.target : arch;
        const { question } = understood({ ...state, target, dims });
        const here = current && current.arch === arch && blockOf(current.dims) === block;
        return mapCell(arch, block, dims, question ? answer(question) : null, here);
      })));
    at("map").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
    const cell = at("map").querySelector("[aria-current]") || at("map").querySelector("button");
    cell.tabIndex = 0;
    if (focused) at("map").querySelector(`[data-cell="${focused}"]`)?.focus();
    performance.mark("drawn");
  }

  function mapCell(arch, block, dims, found, here) {
    const chosen = found?.chosen;
    const pad = chosen?.pad_v_to ? `, V padded to ${chosen.pad_v_to}` : "";
    const proof = chosen ? `, proof: ${chosen.proof}` : "";
    const none = found ? "no backend" : "not answered here";
    const what = chosen ? `${chosen.backend} / ${chosen.kernel}${pad}${proof}` : none;
    const tip = `${block} ${dimsText(dims)} on ${arch}: ${what}`;
    const tell = () => { at("tip").textContent = tip; };
    return make("td", {}, make("button", { type: "button", tabindex: -1, "data-cell": `${arch} ${block}`,
      "aria-label": tip, "aria-current": here ? "true" : null, class: chosen ? chosen.backend : "none",
      mouseenter: tell, focus: tell, click: () => open(arch, dims) },
      ...(chosen ? breakable(chosen.kernel) : ["-"]), chosen?.pad_v_to ? make("sup", {}, "V") : null));
  }

  function open(arch, dims) {
    change({ target: archOf(state.target) === arch ? state.target : arch, dims });
    fillForm();
    at("answer").scrollIntoView();
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
    at("dtype").append(...data.dtypes.map((name) => make("option", {}, name)));
    for (const version of ["", ...data.fa_versions]) {
      at("pins").append(make("label", {}, make("input", { type: "radio", name: "fa", value: version,
        change: () => change({ fa_version: version || null }) }), ` ${version || "any"}`));
    }
    for (const how of ["needs", "prefers"]) {
      for (const [name, meaning] of data.features) {
        const box = make("input", { type: "checkbox", [`data-${how}`]: name,
          change: () => ask(how, name, box.checked) });
        const words = make("span", {}, make("b", {}, name), how === "needs" ? `: ${meaning}` : "");
        at(how).append(make("label", {}, box, words));
      }
    }
    for (const [name, versions] of data.packages) {
      at("packages").append(make("label", {}, name, make("select", { "data-package": name, change: readPackages },
        make("option", { value: "" }, "not installed"), ...versions.map((version) => make("option", {}, version)))));
    }
    at("question").addEventListener("submit", (event) => event.preventDefault());
    at("target").addEventListener("input", () => change({ target: at("target").value }));
    at("dtype").addEventListener("change", () => change({ dtype: at("dtype").value }));
    at("policy").addEventListener("change", () => change({ policy: at("policy").value, shape: null }));
    at("shape").addEventListener("change", () => change({ shape: shapeFrom(at("shape").value) || null }));
    at("model").addEventListener("input", () => {
      const dims = models.get(fold(at("model").value));
      if (dims) { change({ dims }); fillDims(); }
    });
    for (const id of ["nope", "rope", "v"]) at(id).addEventListener("input", readDims);
    at("constrained").addEventListener("change", readPackages);
    at("map").addEventListener("keydown", moveInMap);
    addEventListener("hashchange", () => { state = read(location.hash); fillForm(); show(); drawMap(); });
    at("fingerprint").textContent = data.fingerprint.slice(0, 16);
  }

  /* What the fields propose; nobody needs it before the first answer. */
  function buildLists() {
    const options = (names) => names.map((name) => make("option", { value: name }));
    const targets = Object.entries(data.architectures).flatMap(([arch, [, names]]) => [...names, arch]);
    at("targets").append(...options(targets));
    at("models").append(...options(Object.keys(data.models)));
  }

  function readDims() {
    at("model").value = "";
    change({ dims: ["nope", "rope", "v"].map((id) => width(at(id).value)) });
  }

  /* A feature that is needed or preferred from now on, or no longer. Wishes keep the order in which they were made. */
  function ask(how, name, wanted) {
    const [needs, prefers] = [state.needs, state.prefers].map((names) => names.filter((other) => other !== name));
    if (wanted) (how === "needs" ? needs : prefers).push(name);
    change({ needs: needs.sort(), prefers });
    checkFeatures();
    summarise();
  }

  function checkFeatures() {
    for (const how of ["needs", "prefers"]) {
      for (const box of at(how).querySelectorAll("input")) box.checked = state[how].includes(box.dataset[how]);
    }
  }

  /* The batches that were measured in these dims on this GPU. */
  function fillShapes(question) {
    const shapes = question ? shapesOf(question) : [];
    at("shapes").hidden = state.policy !== "measured" || !shapes.length;
    if (at("shapes").hidden) return;
    const told = (text) => text.replace(/^(\d+)x(\d+)x(\d+)/, "$1 x $2 tokens, $3 heads")
      .replace(" graph", ", CUDA graph");
    at("shape").replaceChildren(make("option", { value: "" }, "any: the mean of all"),
      ...shapes.map((text) => make("option", { value: text }, told(text))));
    at("shape").value = shapeText(state.shape);
  }

  function readPackages(event) {
    const selects = [...document.querySelectorAll("[data-package]")];
    if (event.target.dataset.package) at("constrained").checked = true;
    const chosen = selects.filter((select) => select.value).map((select) => [select.dataset.package, select.value]);
    change({ installed: at("constrained").checked ? Object.fromEntries(chosen) : null });
    summarise();
  }

  function summarise() {
    at("needs-summary").textContent = state.needs.join(", ") || "nothing special";
    at("prefers-summary").textContent = state.prefers.join(", then ") || "nothing";
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
    checkFeatures();
    at("policy").value = state.policy;
    // On a phone the answer comes before what the summaries say anyway.
    const roomy = matchMedia("(min-width: 56rem)").matches;
    at("installed").open = roomy && state.installed !== null;
    for (const how of ["needs", "prefers"]) at(how).open = roomy && state[how].length > 0;
    fillDims();
    summarise();
  }

  buildForm();
  fillForm();
  show();
  // After the answer was painted.
  requestAnimationFrame(() => setTimeout(() => { performance.mark("painted"); buildLists(); drawMap(); }));
  return { answer, read, understood, address, command };
})();
