// Taking the pending calls of an agent, as many as it has places free: the oldest first, without looking at them before.
// Calls that another replica is just taking are passed over, so that replicas share a backlog instead of all wanting its
// beginning.
import { INVOCATION_EVENTS } from "../../../core/states.ts";
import { type Command, type CommandEffects, inputRows, type SqliteStatement } from "../../../storage/store.ts";
import { countMove } from "../counters.ts";
import { isQueued, youngFrom } from "./queued.ts";
import { addTotals } from "./totals.ts";

export interface Taking {
  readonly tenant: string;
  readonly agent_id: string;
  /** The replica that takes the calls. */
  readonly owner: string;
  /** One for each call that may be taken: each claim is an attempt of its own. */
  readonly tokens: readonly string[];
  readonly now: number;
  /**
   * Only calls behind this one, by ID. Where calls have been taken, the database keeps what is left of them for as long
   * as anybody's snapshot, and would pass over all of it each time (measured with one held back: 20 µs more for each call
   * after 4,000).
   */
  readonly after: string;
  /** Calls that are not to be taken. */
  readonly leftOut: readonly string[];
}

export interface TakenCall {
  readonly id: string;
  readonly token: string;
  /** JSON of the call. */
  readonly call: string;
  readonly body: Uint8Array;
}

export interface TakenCalls {
  /** The oldest first. */
  readonly taken: readonly TakenCall[];
  /**
   * The one that is next, and was not taken: its body does not stand in its row, or those before it are a lot to read.
   * Those behind it wait for it.
   */
  readonly large: { readonly id: string; readonly body_bytes: number } | null;
}

const { from, to } = INVOCATION_EVENTS.claim;

/** About what a row brings with it; its body may have eight times as much. */
const ROW_BYTES = 1_024;

/**
 * A block ends behind so much: forty of 64 calls with 24 KB each held the event loop for 28 ms on SQLite (measured), and
 * on Postgres the answer of one statement has the blocks of many agents.
 */
const BLOCK_BYTES_MAX = 128 * 1024;

const INPUT = inputRows<Taking>(
  {
    tenant: ["text", ({ tenant }) => tenant],
    agent_id: ["text", ({ agent_id }) => agent_id],
    owner: ["text", ({ owner }) => owner],
    tokens: ["text", ({ tokens }) => tokens.join()],
    places: ["bigint", ({ tokens }) => tokens.length],
    at: ["bigint", ({ now }) => now],
    young: ["text", ({ now }) => youngFrom(now)],
    after: ["text", ({ after }) => after],
    left_out: ["text", ({ leftOut }) => leftOut.join()],
  },
  2,
);

/** A call that was refused to its caller is not made. The offset does the same as for a claim by ID. */
const isRefused = "exists (select 1 from refused_calls r where r.tenant = c.tenant and r.id = c.id limit 1 offset 0)";

export const takeCommand: Command<Taking, TakenCalls> = {
  name: "take",
  tenantOf: ({ tenant }) => tenant,
  bytesOf: ({ tokens }) => tokens.length * ROW_BYTES,
  keyOf: ({ agent_id }) => agent_id,
  sqlite(prepare) {
    // The plus keeps SQLite to the index of the agent's pending calls: to walk all of the tenant's held the event loop for 28
    // to 195 ms with 60,000 open (measured).
    const next = prepare(
      `select c.id, c.call, c.request, coalesce(c.req_size, 0) as body_bytes from open_invocations c
       where c.agent_id = ?1 and +c.tenant = ?2 and ${isQueued("?3", "?4")} and c.id > ?5 and not ${isRefused}
       order by c.id limit 1`,
    );
    const take = prepare(
      `update open_invocations set status = '${to}', owner = ?, claim = ?, updated_at = ? where id = ?`,
    );
    return (taking, effects) => takeOneByOne({ next, take }, taking, effects);
  },
  postgres: {
    text: `
with input as (
  select *, string_to_array(tokens, ',') as all_tokens, string_to_array(left_out, ',') as all_left_out from ${INPUT.source}
),
found as (
  select n, owner, all_tokens, at, o.* from input, lateral (
    select c.id, c.tenant, c.request is null as is_large, coalesce(c.req_size, 0) as body_bytes,
      octet_length(c.call) + coalesce(octet_length(c.request), 0) as bytes from open_invocations c
    where c.agent_id = input.agent_id and c.tenant = input.tenant and ${isQueued("input.owner", "input.young")}
      and c.id > input.after and not ${isRefused} and c.id <> all(input.all_left_out)
    order by c.id limit input.places
    for update skip locked
  ) o
),
placed as (
  select *, row_number() over arrived as place, count(*) filter (where is_large) over arrived as large,
    sum(bytes) over arrived - bytes as bytes_before from found
  window arrived as (partition by n order by id)
),
taken as (
  select n, id, tenant, owner, at, all_tokens[place] as token from placed
  where large = 0 and bytes_before <= ${BLOCK_BYTES_MAX}
),
totals as (${addTotals({ calls: "taken", alike: [], totals: `('status', '${from}', -1), ('status', '${to}', 1)` })}
),
claimed as (
  update open_invocations o set status = '${to}', owner = taken.owner, claim = taken.token, updated_at = taken.at
  from taken where o.id = any(array[taken.id])
  returning taken.n, o.id, o.claim, o.call, o.request
)
select n, id, claim as token, call, request as body, null::bigint as body_bytes from claimed
union all select n, id, null, null, null, body_bytes from placed where large > 0 or bytes_before > ${BLOCK_BYTES_MAX}
order by n, id`,
    valuesOf: (inputs, shard) => [shard, ...INPUT.values(inputs)],
    outputsOf(inputs, rows) {
      const outputs = inputs.map(() => ({ taken: [] as TakenCall[], large: null as TakenCalls["large"] }));
      for (const row of rows) {
        const output = outputs[Number(row["n"]) - 1];
        if (output === undefined) continue;
        if (row["token"] !== null) output.taken.push(row as unknown as TakenCall);
        else output.large ??= { id: String(row["id"]), body_bytes: Number(row["body_bytes"]) };
      }
      return outputs;
    },
  },
};

type NextRow = Pick<TakenCall, "id" | "call"> & { readonly request: Uint8Array | null; readonly body_bytes: number };

function takeOneByOne(
  { next, take }: Readonly<Record<"next" | "take", SqliteStatement>>,
  taking: Taking,
  effects: CommandEffects,
): TakenCalls {
  const { tenant, agent_id, owner, tokens, now, after, leftOut } = taking;
  const young = youngFrom(now);
  const taken: TakenCall[] = [];
  let bytes = 0;
  for (let last = after; taken.length < tokens.length; ) {
    const row = next.get(agent_id, tenant, owner, young, last) as NextRow | null;
    if (row === null) break;
    const { id, call, request, body_bytes } = row;
    last = id;
    if (leftOut.includes(id)) continue;
    if (request === null || bytes > BLOCK_BYTES_MAX) return { taken, large: { id, body_bytes } };
    bytes += call.length + request.byteLength;
    const token = tokens[taken.length] ?? "";
    take.run(owner, token, now, id);
    countMove(effects, { tenant, id }, from, to);
    taken.push({ id, token, call, body: request });
  }
  return { taken, large: null };
}
