import { Task } from "tracelake_function";

export async function handler(event) {
  const task = new Task(event);
  const size = task.config.chunk_size;
  console.log(`${task.job.name}: blocks ${task.start} to ${task.end} in chunks of ${size}`);
  for (let start = task.start; start <= task.end; start += size) {
    await task.emit({ start, end: Math.min(start + size - 1, task.end) });
  }
}
