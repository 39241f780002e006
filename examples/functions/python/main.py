from tracelake_function import Task


def handler(event, context):
    task = Task(event)
    size = task.config["chunk_size"]
    print(f"{task.job['name']}: blocks {task.start} to {task.end} in chunks of {size}")
    for start in range(task.start, task.end + 1, size):
        task.emit(start=start, end=min(start + size - 1, task.end))
