// Transfers of a large amount become alerts: the same as ../python.
import { Task } from "tracelake_function";

const LARGE = (window) => `
    SELECT block_number, transaction_hash, log_index, address, from_address, to_address, value
    FROM token_transfers WHERE ${window} AND CAST(value AS DOUBLE) >= ?
`;

export async function handler(event) {
  const task = new Task(event);
  const found = await task.query(LARGE(task.window()), [task.config.large]);
  const transfers = found.rows.map((row) => Object.fromEntries(row.map((value, i) => [found.columns[i], value])));
  await task.publish("alert_events", transfers.map((each) => alert(each, task.config.critical)));
}

function alert({ transaction_hash, log_index, block_number, address, from_address, to_address, value }, critical) {
  return {
    dedupe_key: `${transaction_hash}:${log_index}`,
    block_number,
    severity: BigInt(value) >= BigInt(critical) ? "critical" : "warning",
    token: address,
    payload: { from_address, to_address, value },
  };
}
