-- A body is written once and read once: compressing a large one costs more than the room that it takes meanwhile.
ALTER TABLE tracelake_queue.messages ALTER COLUMN body SET STORAGE EXTERNAL;
