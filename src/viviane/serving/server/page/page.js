"use strict";
const $ = (id) => document.getElementById(id);
let model = null;
// Input elements by column. A form's own collection will not do: its "item" and "length" are not the columns.
const fields = new Map();

async function ask(path, body) {
  const options = body === undefined ? {} :
    { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const reply = await fetch(path, options);
  const content = await reply.json();
  if (!reply.ok) throw Object.assign(new Error(content.error || reply.statusText), content);
  return content;
}

function element(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made[key] = value;
  made.append(...children);
  return made;
}

const isNumber = (column) => column.dtype !== "string";
const isList = (column) => column.shape.length > 1;

function describe(column) {
  const kind = column.format || column.dtype;
  const range = column.num_ids ? `, below ${column.num_ids}` : "";
  return isList(column) ? `list of ${kind}${range}` : column.format === "list" ? `values between ${column.separator}` : kind + range;
}

function shown(value) {
  return Array.isArray(value) ? value.join(" ") : value === null ? "" : String(value);
}

function single(column, text) {
  if (!isNumber(column) || (column.raw && !/^[+-]?[0-9.]+(e[+-]?[0-9]+)?$/i.test(text))) return text;
  const number = Number(text);
  // whole numbers beyond 2^53 would be rounded; raw columns take them as text
  if (text === "" || Number.isNaN(number)) return text;
  return Number.isInteger(number) && !Number.isSafeInteger(number) ? text : number;
}

function value(column, text) {
  text = text.trim();
  if (isList(column)) return text === "" ? [] : text.split(/[\s,]+/).map((part) => single(column, part));
  return text === "" && column.nullable ? null : single(column, text);
}

function row() {
  const found = Object.create(null);
  for (const column of model.inputs) found[column.name] = value(column, fields.get(column.name).value);
  return found;
}

function showCurl() {
  const body = JSON.stringify({ instances: [row()] }).replaceAll("'", "'\\''");
  $("curl").textContent = `curl ${location.origin}/v1/models/${model.name}:predict \\\n` +
    `  -H 'content-type: application/json' \\\n  -d '${body}'`;
}

function fill(values) {
  for (const column of model.inputs) fields.get(column.name).value = shown(values[column.name]);
  showCurl();
}

async function choose(name) {
  try {
    model = await ask(`/v1/models/${encodeURIComponent(name)}`);
  } catch (error) {
    $("state").textContent = error.message;
    return;
  }
  $("state").textContent = `version ${model.version}, ${model.ready ? "ready" : "not ready"}`;
  $("hint").textContent = model.raw ? "Values as they are logged; an empty field is a missing value." :
    "Ids and numbers as the ETL writes them; lists with spaces between their values.";
  fields.clear();
  for (const column of model.inputs) {
    fields.set(column.name, element("input", { autocomplete: "off", spellcheck: false,
      inputMode: isNumber(column) && !isList(column) ? "decimal" : "text" }));
  }
  $("row").replaceChildren(...model.inputs.map((column) => element("label", { className: "field" },
    column.name, " ", element("small", {}, describe(column)), fields.get(column.name))));
  fill(model.example);
}

function showAnswer(prediction) {
  const scores = typeof prediction === "object" && prediction !== null ? prediction : { [model.outputs[0].name]: prediction };
  $("answer").replaceChildren(...Object.entries(scores).map(([name, score]) => element("div", { className: "score" }, name,
    element("b", {}, score === null ? "not a number" : score.toPrecision(6)),
    ...(score >= 0 && score <= 1 ? [element("meter", { min: 0, max: 1, value: score, title: name })] : []))));
}

function showError(error) {
  const problems = error.problems || [];
  for (const problem of problems) {
    fields.get(problem.column)?.classList.add("wrong");
  }
  const text = problems.length ? problems.map((one) => `${one.column || "row"}: ${one.problem} (${one.value})`).join("\n") :
    error.message;
  $("answer").replaceChildren(element("p", { className: "error" }, text));
}

$("row").addEventListener("submit", async (event) => {
  event.preventDefault();
  for (const field of fields.values()) field.classList.remove("wrong");
  const button = document.querySelector("button[type=submit]");
  button.disabled = true;
  try {
    const reply = await ask(`/v1/models/${encodeURIComponent(model.name)}:predict`, { instances: [row()] });
    showAnswer(reply.predictions[0]);
  } catch (error) {
    showError(error);
  }
  button.disabled = false;
});
$("row").addEventListener("input", showCurl);
$("example").addEventListener("click", () => fill(model.example));
$("model").addEventListener("change", () => choose($("model").value));

(async () => {
  const { models } = await ask("/v1/models");
  $("model").replaceChildren(...models.map((name) => element("option", { value: name }, name)));
  if (models.length) await choose(models[0]);
  else $("state").textContent = "no model is loaded";
})();
