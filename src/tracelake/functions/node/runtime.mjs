/**
 * The Lambda Runtime API for Node: loads the handler, then asks for one invocation after the other.
 *
 *     node runtime.mjs module.handler
 *
 * The module is CommonJS or an ES module, found below LAMBDA_TASK_ROOT as .mjs, .cjs or .js. The handler takes
 * (event, context) and returns a value or a promise, or takes a callback as its third parameter.
 */
import { existsSync } from "node:fs";
import http from "node:http";
import path from "node:path";
import { pathToFileURL } from "node:url";
import { format } from "node:util";

const API = `http://${process.env.AWS_LAMBDA_RUNTIME_API}/2018-06-01/runtime`;
const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });

function call(method, place, body, headers = {}) {
  return new Promise((resolve, reject) => {
    const sent = body === undefined ? undefined : Buffer.from(body);
    const sized = sent ? { ...headers, "Content-Type": "application/json", "Content-Length": sent.length } : {};
    const request = http.request(API + place, { method, headers: sized, agent }, (answer) => {
      const parts = [];
      answer.on("data", (part) => parts.push(part));
      answer.on("end", () => resolve({ headers: answer.headers, text: Buffer.concat(parts).toString() }));
      answer.on("error", reject);
    });
    request.on("error", reject);
    request.end(sent);
  });
}

function described(error) {
  if (!(error instanceof Error)) return { errorType: typeof error, errorMessage: format(error), stackTrace: [] };
  const stackTrace = (error.stack ?? "").split("\n").slice(1).map((line) => line.trim());
  return { errorType: error.name, errorMessage: error.message, stackTrace };
}

async function load(entrypoint) {
  const dot = entrypoint.lastIndexOf(".");
  const [name, exported] = [entrypoint.slice(0, dot), entrypoint.slice(dot + 1)];
  const base = path.resolve(process.env.LAMBDA_TASK_ROOT, name);
  const file = [".mjs", ".cjs", ".js"].map((ending) => base + ending).find(existsSync);
  if (!file) throw Object.assign(new Error(`there is no module ${name}`), { name: "Runtime.ImportModuleError" });
  const module = await import(pathToFileURL(file).href);
  const handler = module[exported] ?? module.default?.[exported];
  if (typeof handler !== "function") {
    const message = `${entrypoint} is not a function that the module exports`;
    throw Object.assign(new Error(message), { name: "Runtime.HandlerNotFound" });
  }
  return handler;
}

function contextOf(headers) {
  const deadline = Number(headers["lambda-runtime-deadline-ms"]);
  return {
    awsRequestId: headers["lambda-runtime-aws-request-id"],
    invokedFunctionArn: headers["lambda-runtime-invoked-function-arn"],
    functionName: process.env.AWS_LAMBDA_FUNCTION_NAME,
    functionVersion: process.env.AWS_LAMBDA_FUNCTION_VERSION,
    memoryLimitInMB: process.env.AWS_LAMBDA_FUNCTION_MEMORY_SIZE,
    logGroupName: process.env.AWS_LAMBDA_LOG_GROUP_NAME,
    logStreamName: process.env.AWS_LAMBDA_LOG_STREAM_NAME,
    callbackWaitsForEmptyEventLoop: true,
    getRemainingTimeInMillis: () => Math.max(0, deadline - Date.now()),
  };
}

function run(handler, event, context) {
  if (handler.length < 3) return handler(event, context);
  return new Promise((resolve, reject) => {
    const returned = handler(event, context, (error, value) => (error ? reject(error) : resolve(value)));
    if (typeof returned?.then === "function") returned.then(resolve, reject);
  });
}

async function fail(place, error) {
  const report = described(error);
  process.stderr.write(`${error instanceof Error ? error.stack : format(error)}\n`);
  const headers = { "Lambda-Runtime-Function-Error-Type": report.errorType.replace(/[^\x20-\x7e]/g, "?") };
  await call("POST", place, JSON.stringify(report), headers);
}

let current = null;

/** An uncaught error fails the current invocation; the process can't be reused. */
async function uncaught(error) {
  await fail(current ? `/invocation/${current}/error` : "/init/error", error);
  process.exit(1);
}

process.on("uncaughtException", uncaught);
process.on("unhandledRejection", uncaught);

const handler = await load(process.argv[2]).catch(uncaught);
for (;;) {
  const { headers, text } = await call("GET", "/invocation/next");
  current = headers["lambda-runtime-aws-request-id"];
  if (headers["lambda-runtime-trace-id"]) process.env._X_AMZN_TRACE_ID = headers["lambda-runtime-trace-id"];
  try {
    const value = await run(handler, JSON.parse(text), contextOf(headers));
    await call("POST", `/invocation/${current}/response`, JSON.stringify(value === undefined ? null : value));
  } catch (error) {
    await fail(`/invocation/${current}/error`, error);
  }
  current = null;
}
