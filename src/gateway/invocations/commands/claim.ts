// Taking a pending call: from here on only the one who has the token makes it.
import { CAPTURE_BYTES_MAX } from "../../../core/limits.ts";
import { INVOCATION_EVENTS } from "../../../core/states.ts";
import { type Command, inputRows } from "../../../storage/store.ts";
import { countMove } from "../counters.ts";
import type { Claim } from "../service.ts";
import { addTotals } from "./totals.ts";

/** The stored call; all is null where the claimer has it in hand. */
export interface ClaimedCall {
  readonly call: string | null;
  /** Null for one that is stored in parts. */
  readonly body: Uint8Array | null;
  /** Of the body that the call is made with. */
  readonly size: number | string | null;
}

const { from, to } = INVOCATION_EVENTS.claim;

/**
 * A call waits while its payment may still land or fail, and one that was refused to its caller is not made, even if its
 * row appears later. The offset keeps Postgres from reading all refused calls at once instead, as it does for good when
 * there was none at first.
 */
const isFree = `(o.status = '${from}' and coalesce(o.settlement_status, '') <> 'pending'
    and not exists (select 1 from refused_calls r where r.tenant = o.tenant and r.id = o.id limit 1 offset 0))`;

/** Of a streamed call only what may be shown is stored. */
const STORED_SIZE = `case when o.mode = 'streaming' and o.req_size > ${CAPTURE_BYTES_MAX} then ${CAPTURE_BYTES_MAX} else o.req_size end`;

/** A claim that was stored without its answer is found by its token. */
const isOwn = (token: string) => `(o.status = '${to}' and o.claim = ${token})`;

const INPUT = inputRows<Claim>(
  {
    id: ["text", ({ key }) => key.id],
    tenant: ["text", ({ key }) => key.tenant],
    owner: ["text", ({ owner }) => owner],
    token: ["text", ({ token }) => token],
    at: ["bigint", ({ now }) => now],
    wanted: ["boolean", ({ inHand }) => inHand === null],
  },
  2,
);

const NOTHING: ClaimedCall = { call: null, body: null, size: null };

/** Null when someone else has taken the call, or it has ended. */
export const claimCommand: Command<Claim, ClaimedCall | null> = {
  name: "claim",
  tenantOf: ({ key }) => key.tenant,
  bytesOf: () => 256,
  keyOf: ({ key }) => key.id,
  sqlite(prepare) {
    const take = prepare(
      `update open_invocations as o set status = '${to}', owner = ?, claim = ?, updated_at = ?
       where o.id = ? and o.tenant = ? and ${isFree}`,
    );
    const own = prepare(`select 1 from open_invocations o where o.id = ? and o.tenant = ? and ${isOwn("?")}`);
    const stored = prepare(
      `select call, request as body, ${STORED_SIZE} as size from open_invocations o where id = ? and tenant = ?`,
    );
    return ({ key: { id, tenant }, owner, token, now, inHand }, effects) => {
      if (take.run(owner, token, now, id, tenant) > 0) countMove(effects, { tenant, id }, from, to);
      else if (own.get(id, tenant, token) === null) return null;
      return inHand === null ? (stored.get(id, tenant) as unknown as ClaimedCall) : NOTHING;
    };
  },
  postgres: {
    // The rows are locked in the order of the input, which is the same everywhere, and judged again then. One that another
    // replica has is not locked: that one may be about to end it while it looks for another of this replica.
    text: `
with taken as (
  select o.id, o.tenant, o.status, input.owner, input.token, input.at, input.wanted from ${INPUT.source}, lateral (
    select o.id, o.tenant, o.status from open_invocations o
    where o.id = input.id and o.tenant = input.tenant and (${isFree} or ${isOwn("input.token")})
    for update of o
  ) o
),
totals as (${addTotals({
      calls: `taken where status = '${from}'`,
      alike: [],
      totals: `('status', '${from}', -1), ('status', '${to}', 1)`,
    })}
),
claimed as (
  update open_invocations o set status = '${to}', owner = taken.owner, claim = taken.token, updated_at = taken.at
  from taken where o.id = any(array[taken.id])
  returning o.id, case when taken.wanted then o.call end as call, case when taken.wanted then o.request end as body,
    ${STORED_SIZE} as size
)
select id, call, body, size from claimed`,
    valuesOf: (inputs, shard) => [shard, ...INPUT.values(inputs.toSorted((a, b) => (a.key.id < b.key.id ? -1 : 1)))],
    outputsOf(inputs, rows) {
      const claimed = new Map(rows.map((row) => [row["id"], row as unknown as ClaimedCall]));
      return inputs.map(({ key }) => claimed.get(key.id) ?? null);
    },
  },
};
