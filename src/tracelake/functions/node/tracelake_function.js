/**
 * The Tracelake client for functions: one file, no dependencies but Node. Both
 *
 *     import { Task } from "tracelake_function";
 *     const { Task } = require("tracelake_function");
 *
 * work. A function that returns without a value is completed by its runtime, and its outputs are announced with
 * the task's own scope; an exception fails the attempt, and the platform decides about a retry. So `complete` and
 * `fail` are for functions that want to report more, or earlier. Every call is made for this attempt and fenced:
 * once another attempt has been claimed, every call throws TaskError with status 409.
 */
"use strict";

const { randomUUID } = require("node:crypto");
const http = require("node:http");

const TRIES = 6;
const TIMEOUT_MS = 35_000;
const QUERY_MS = 300_000;
// A publish may be larger, but not by much: further records go with the next one.
const BATCH_BYTES = 8 * 1024 * 1024;
// JSON's integers may be longer than a Number: while JSON is read or written, they are strings with a marker that
// no other value contains.
const MARK = `${randomUUID()}:`;
const MARKED = new RegExp(`"${MARK}(-?[0-9]+)"`, "g");
const LONG = /"(?:[^"\\]|\\.)*"|(?<![0-9.eE+-])-?[0-9]{16,}(?![0-9.eE])/g;

/** The platform refused a call: `status` as in HTTP, `reason` a stable word, the text for people. */
class TaskError extends Error {
  constructor(status, reason, message) {
    super(`${reason}: ${message}`);
    this.name = "TaskError";
    this.status = status;
    this.reason = reason;
  }
}

/** One attempt of a task, as its event describes it. */
class Task {
  #leaseToken;
  #token;
  #url;

  constructor(event, url = process.env.TRACE_DISPATCHER_URL) {
    this.taskId = event.task_id;
    this.attempt = event.attempt;
    this.job = event.job;
    this.config = event.config ?? {};
    this.inputs = event.inputs;
    this.outputs = event.outputs;
    this.source = event.source ?? null;
    this.#leaseToken = event.lease_token;
    this.#token = event.capability_token;
    this.#url = url.replace(/\/+$/, "");
  }

  /** `start` and `end` of a PerPartition task, `after` and `upto` of a PerUpdate one. */
  get scope() {
    const read = this.inputs.find((entry) => entry.trigger !== false) ?? {};
    const names = "start" in read ? ["start", "end"] : ["after", "upto"];
    return Object.fromEntries(names.filter((name) => name in read).map((name) => [name, read[name]]));
  }

  get start() {
    return this.scope.start;
  }

  get end() {
    return this.scope.end;
  }

  get after() {
    return this.scope.after;
  }

  get upto() {
    return this.scope.upto;
  }

  /** Announce that an output reaches up to `cursor`, or holds the blocks `start` to `end`. */
  emit(scope) {
    return this.emitAll([this.event(scope)]);
  }

  emitAll(events) {
    return this.#call("events", { events });
  }

  /** One event for `emitAll` or `complete`. */
  event({ cursor, start, end, output = 0 }) {
    const { dataset_uuid, dataset_version } = this.outputs[output];
    return { dataset_uuid, dataset_version, cursor, start, end };
  }

  /** The name of an input in a query: its published name, or `input_0` and so on. */
  table(index = 0) {
    return this.inputs[index].dataset ?? `input_${index}`;
  }

  /**
   * A SQL condition for the rows of an input that this task covers: its scope, and the `where` of its edge.
   *
   * `(block_number > 5 AND block_number <= 9 AND (severity = 'critical'))`; `(TRUE)` for an input that is read
   * as a whole.
   */
  window(index = 0) {
    const read = this.inputs[index];
    const column = read.cursor_column ?? "block_number";
    const signs = { start: ">=", end: "<=", after: ">", upto: "<=" };
    const scoped = Object.keys(signs).filter((name) => read[name] !== undefined && read[name] !== null);
    const terms = scoped.map((name) => `${column} ${signs[name]} ${Number(read[name])}`);
    if (read.where) terms.push(`(${read.where})`);
    return `(${terms.join(" AND ") || "TRUE"})`;
  }

  /**
   * One SELECT over the task's own inputs: `{columns, types, rows, row_count, truncated}`.
   *
   * Each is a table under `table(index)`, in the version that the task was given. `params` are an array for `?`,
   * or an object for `$name`; a Buffer is compared with binary columns, which come back as "0x…". An integer that
   * a Number can't hold exactly is a BigInt. `export: true` writes all rows to a Parquet file and returns its
   * `query_id` and `download` path; fetch it with the same capability token while this attempt lasts.
   */
  query(sql, params, { limit, export: exported } = {}) {
    const body = { sql, params: marked(params), limit, export: exported || undefined };
    return this.#call("query", body, { fenced: false, timeout: QUERY_MS });
  }

  /**
   * Publish records to a buffered dataset; `{accepted, batch_id}`, with no batch for no records.
   *
   * Publishing a record twice is harmless: the dataset's key makes it one row. With a `schemaHash` they are refused
   * (409 SchemaMismatch) when the dataset's schema isn't that one.
   */
  async publish(dataset, records, schemaHash) {
    let done = { accepted: 0, batch_id: null };
    for (const batch of batches(records)) {
      const body = { dataset, schema_hash: schemaHash, records: batch };
      const answer = await this.#call("buffer-publish", body);
      done = { ...answer, accepted: done.accepted + answer.accepted };
    }
    return done;
  }

  /** The body of the webhook's delivery that the task is for, as it came, whatever its size: a Buffer. */
  async sourceBody() {
    const delivery = this.source?.delivery;
    if (!delivery) throw new TaskError(404, "NoDelivery", "the task isn't for a delivery of a webhook");
    if (delivery.body != null) return Buffer.from(delivery.body);
    if (delivery.body_base64 != null) return Buffer.from(delivery.body_base64, "base64");
    const headers = { "X-Trace-Task-Capability": this.#token };
    const answer = await send("GET", `${this.#url}/v1/task/source-body`, headers, undefined, TIMEOUT_MS);
    if (answer.status >= 300) throw refusal(answer.status, answer.body.toString());
    return answer.body;
  }

  /** Extend the lease; `cancel` in the answer means: stop. */
  async heartbeat() {
    const answer = await this.#call("heartbeat", {});
    this.#token = answer.capability_token ?? this.#token;
    return answer;
  }

  /** Complete the task. Without `events`, outputs without storage are announced with the task's scope. */
  complete({ events = this.ownScope(), outputs = [] } = {}) {
    return this.#call("complete", { status: "Completed", events, outputs });
  }

  fail(message, { retryable = true } = {}) {
    return this.#call("complete", { status: "Failed", error_message: message, retryable });
  }

  /** One event for each output without storage, with the scope that the task was given. */
  ownScope() {
    const { start, end, upto } = this.scope;
    const scope = start !== undefined ? { start, end } : upto >= 0 ? { cursor: upto } : null;
    const free = this.outputs.map((output, index) => (output.storage === "none" ? index : -1));
    return scope ? free.filter((index) => index >= 0).map((output) => this.event({ ...scope, output })) : [];
  }

  async #call(name, body, { fenced = true, timeout = TIMEOUT_MS } = {}) {
    const fence = { task_id: this.taskId, attempt: this.attempt, lease_token: this.#leaseToken };
    const sent = toJson({ ...(fenced ? fence : {}), ...body });
    const headers = { "Content-Type": "application/json", "X-Trace-Task-Capability": this.#token };
    let error;
    for (let attempt = 0; attempt < TRIES; attempt++) {
      try {
        const answer = await post(`${this.#url}/v1/task/${name}`, headers, sent, timeout);
        if (answer.status < 300) return fromJson(answer.text);
        error = refusal(answer.status, answer.text);
        if (answer.status < 500) throw error;
      } catch (lost) {
        if (lost instanceof TaskError) throw lost;
        error = new TaskError(503, "Unreachable", `/v1/task/${name}: ${lost.message}`);
      }
      // Every call may be repeated: the platform recognizes a repeated call.
      await new Promise((wake) => setTimeout(wake, 100 * 2 ** attempt * (0.5 + Math.random())));
    }
    throw error;
  }
}

async function post(url, headers, body, timeout) {
  const sized = { ...headers, "Content-Length": Buffer.byteLength(body) };
  const answer = await send("POST", url, sized, body, timeout);
  return { status: answer.status, text: answer.body.toString() };
}

function send(method, url, headers, body, timeout) {
  return new Promise((resolve, reject) => {
    const request = http.request(url, { method, headers, timeout }, (answer) => {
      const parts = [];
      answer.on("data", (part) => parts.push(part));
      answer.on("end", () => resolve({ status: answer.statusCode, body: Buffer.concat(parts) }));
      answer.on("error", reject);
    });
    request.on("timeout", () => request.destroy(new Error("no answer in time")));
    request.on("error", reject);
    request.end(body);
  });
}

function refusal(status, text) {
  try {
    const problem = JSON.parse(text);
    return new TaskError(status, problem.reason ?? `Status${status}`, problem.detail ?? problem.title);
  } catch {
    return new TaskError(status, `Status${status}`, text.slice(0, 500) || "no explanation");
  }
}

function* batches(records) {
  let batch = [];
  let size = 0;
  for (const record of records) {
    const more = Buffer.byteLength(toJson(record));
    if (batch.length && size + more > BATCH_BYTES) {
      yield batch;
      batch = [];
      size = 0;
    }
    batch.push(record);
    size += more;
  }
  if (batch.length) yield batch;
}

/** Bytes are marked: as text they would be compared with text. */
function marked(params) {
  if (ArrayBuffer.isView(params)) return { blob: hex(params) };
  if (Array.isArray(params)) return params.map(marked);
  if (params === null || typeof params !== "object" || params instanceof Date) return params;
  return Object.fromEntries(Object.entries(params).map(([name, value]) => [name, marked(value)]));
}

/** Bytes as "0x…", BigInts with all their digits. */
function toJson(value) {
  const text = JSON.stringify(value, function (name, shown) {
    // JSON.stringify passes a Buffer's toJSON() result, so the original value is read from `this`.
    const kept = this[name];
    if (ArrayBuffer.isView(kept)) return hex(kept);
    return typeof kept === "bigint" ? MARK + kept : shown;
  });
  return text.includes(MARK) ? text.replaceAll(MARKED, "$1") : text;
}

/** An integer that a Number can't hold becomes a BigInt. */
function fromJson(text) {
  const marked = text.replace(LONG, (found) => (found[0] === '"' ? found : `"${MARK}${found}"`));
  return JSON.parse(marked, (_, value) => {
    if (typeof value !== "string" || !value.startsWith(MARK)) return value;
    const digits = value.slice(MARK.length);
    return Number.isSafeInteger(Number(digits)) ? Number(digits) : BigInt(digits);
  });
}

function hex(view) {
  return "0x" + Buffer.from(view.buffer, view.byteOffset, view.byteLength).toString("hex");
}

exports.Task = Task;
exports.TaskError = TaskError;
