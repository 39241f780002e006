-- Deliveries go on while rows of one producer wait for their block to be final.

-- A producer of which rows wait: those beyond `position`, up to the delivery's own, aren't messages yet. `block` is that of
-- the first of them; without one they are being read. `since`: the first has been the same.
CREATE TABLE delivery_wait (
    delivery_id uuid NOT NULL REFERENCES delivery,
    producer    text NOT NULL,
    position    bigint NOT NULL,
    block       bigint,
    since       timestamptz NOT NULL DEFAULT tl_now(),
    PRIMARY KEY (delivery_id, producer)
);
