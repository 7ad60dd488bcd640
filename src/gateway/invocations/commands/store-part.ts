// Storing one part of a large body, before its call is accepted. Its parts are loose until then, so that they do not stay
// when that never happens: see loose-parts.ts.
import { type Command, inputRows } from "../../../storage/store.ts";
import type { InvocationKey } from "../service.ts";
import { sameRequest } from "./same-row.ts";

export interface BodyPart {
  readonly key: InvocationKey;
  /** The first one is stored before the others are handed in. */
  readonly n: number;
  readonly bytes: Uint8Array;
  /** When the parts of this body may be removed. */
  readonly dueAt: number;
}

const INPUT = inputRows<BodyPart>({
  id: ["text", ({ key }) => key.id],
  tenant: ["text", ({ key }) => key.tenant],
  part: ["bigint", ({ n }) => n],
  due_at: ["bigint", ({ dueAt }) => dueAt],
  bytes: ["bytea", ({ bytes }) => bytes],
});

/** False when the parts of this body are being removed. */
export const storePartCommand: Command<BodyPart, boolean> = {
  name: "store_part",
  tenantOf: ({ key }) => key.tenant,
  bytesOf: ({ bytes }) => bytes.byteLength,
  sqlite(prepare) {
    const begin = prepare(
      "insert into loose_parts (invocation_id, tenant, kind, first, due_at) values (?, ?, 'request', 0, ?)",
    );
    const look = prepare(
      "select 1 from loose_parts where invocation_id = ? and kind = 'request' and tenant = ? and due_at <> 0",
    );
    const insert = prepare(
      "insert into body_parts (invocation_id, tenant, kind, n, bytes) values (?, ?, 'request', ?, ?)",
    );
    return ({ key: { id, tenant }, n, bytes, dueAt }) => {
      if (n === 0) begin.run(id, tenant, dueAt);
      else if (look.get(id, tenant) === null) return false;
      insert.run(id, tenant, n, bytes);
      return true;
    };
  },
  postgres: {
    // Whoever removes the parts changes the locked row first, and so waits for a commit whose answer was lost.
    text: `
with input as (select * from ${INPUT.source}),
begun as (
  insert into loose_parts (invocation_id, tenant, kind, first, due_at)
  select id, tenant, 'request', 0, due_at from input where part = 0
),
held as (
  select input.id, input.part from input, lateral (
    select 1 from loose_parts l
    where ${sameRequest("l", { tenant: "input.tenant", id: "input.id" })} and l.due_at <> 0
    for share
  ) l where input.part > 0
)
insert into body_parts (invocation_id, tenant, kind, n, bytes)
select id, tenant, 'request', part, bytes from input
where part = 0 or (id, part) in (select id, part from held)
returning invocation_id, n`,
    valuesOf: (inputs) => INPUT.values(inputs),
    outputsOf(inputs, rows) {
      const stored = new Set(rows.map((row) => `${row["invocation_id"]} ${row["n"]}`));
      return inputs.map(({ key, n }) => stored.has(`${key.id} ${n}`));
    },
  },
};
