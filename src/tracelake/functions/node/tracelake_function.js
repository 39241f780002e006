/**
 * The Tracelake client for functions: one file, nothing but Node itself. Both
 *
 *     import { Task } from "tracelake_function";
 *     const { Task } = require("tracelake_function");
 *
 * work. A function that returns without a word is completed by its runtime, and its outputs are announced with
 * the task's own scope; an exception fails the attempt, and the platform decides about another. Every call is
 * made for this attempt and fenced: once another attempt has been claimed, a TaskError with status 409 is all
 * there is to hear.
 */
"use strict";

const http = require("node:http");

const TRIES = 6;
const TIMEOUT_MS = 35_000;

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

  /** Say that an output reaches up to `cursor`, or holds the blocks `start` to `end`. */
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

  /** Hand records to a buffered dataset. */
  publish(dataset, records, schema_hash) {
    return this.#call("buffer-publish", { dataset, records, schema_hash });
  }

  /** One SELECT over the task's own datasets: `{columns, rows, row_count, truncated}`. */
  query(sql, { params, limit } = {}) {
    return this.#call("query", { sql, params, limit }, false);
  }

  /** Hold the lease for another while; `cancel` in the answer means: stop. */
  async heartbeat() {
    const answer = await this.#call("heartbeat", {});
    this.#token = answer.capability_token ?? this.#token;
    return answer;
  }

  /** Done. Without `events` the outputs that are nothing but events are announced with this scope. */
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

  async #call(name, body, fenced = true) {
    const fence = { task_id: this.taskId, attempt: this.attempt, lease_token: this.#leaseToken };
    const sent = JSON.stringify({ ...(fenced ? fence : {}), ...body });
    const headers = { "Content-Type": "application/json", "X-Trace-Task-Capability": this.#token };
    let error;
    for (let attempt = 0; attempt < TRIES; attempt++) {
      try {
        const answer = await post(`${this.#url}/v1/task/${name}`, headers, sent);
        if (answer.status < 300) return JSON.parse(answer.text);
        error = refusal(name, answer.status, answer.text);
        if (answer.status < 500) throw error;
      } catch (lost) {
        if (lost instanceof TaskError) throw lost;
        error = new TaskError(503, "Unreachable", `/v1/task/${name}: ${lost.message}`);
      }
      // Every call may be repeated: the platform takes the second for the first.
      await new Promise((wake) => setTimeout(wake, 100 * 2 ** attempt * (0.5 + Math.random())));
    }
    throw error;
  }
}

function post(url, headers, body) {
  return new Promise((resolve, reject) => {
    const sized = { ...headers, "Content-Length": Buffer.byteLength(body) };
    const request = http.request(url, { method: "POST", headers: sized, timeout: TIMEOUT_MS }, (answer) => {
      const parts = [];
      answer.on("data", (part) => parts.push(part));
      answer.on("end", () => resolve({ status: answer.statusCode, text: Buffer.concat(parts).toString() }));
      answer.on("error", reject);
    });
    request.on("timeout", () => request.destroy(new Error("no answer in time")));
    request.on("error", reject);
    request.end(body);
  });
}

function refusal(name, status, text) {
  if (status === 404 && (name === "query" || name === "buffer-publish")) {
    const served = name === "query" ? "queries" : "buffered datasets";
    return new TaskError(404, "NotServed", `this installation doesn't serve ${served} to tasks`);
  }
  try {
    const problem = JSON.parse(text);
    return new TaskError(status, problem.reason ?? `Status${status}`, problem.detail ?? problem.title);
  } catch {
    return new TaskError(status, `Status${status}`, text.slice(0, 500) || "no explanation");
  }
}

exports.Task = Task;
exports.TaskError = TaskError;
