// Idempotency keys: for 24 hours a key of a caller stands for the first call to the agent that was sent with it.
import { and, eq } from "drizzle-orm";
import type { Tables } from "../../../db/schema.ts";
import type { Call } from "../../core/call.ts";
import { Fault } from "../../core/fault.ts";
import { HOUR_MS } from "../../core/time.ts";
import { IDEMPOTENCY_HOURS } from "../../kernel/limits.ts";
import { type Command, type CommandRunner, foundBy, hasKey, inputRows, type Tx } from "../../storage/store.ts";
import type { InvocationRow } from "./service.ts";

export interface Idempotency {
  readonly key: string;
  readonly body_sha256: string;
  /** Earliest possible time of the request, for expiry: a key that expired too early would let its call be made twice. */
  readonly asked_at: number;
  /** Latest possible time of the request. The key's 24 hours count from it. */
  readonly latest: number;
}

export const IDEMPOTENCY_MS = IDEMPOTENCY_HOURS * HOUR_MS;

type KeyOwner = Pick<InvocationRow, "tenant" | "caller" | "agent_id">;

interface WantedKey {
  readonly owner: KeyOwner;
  readonly key: string;
  readonly asked_at: number;
}

type KnownKey = Pick<Tables["idempotencyKeys"]["$inferSelect"], "body_sha256" | "invocation_id">;

const KEY_INPUT = inputRows<WantedKey>({
  tenant: ["text", ({ owner }) => owner.tenant],
  caller: ["text", ({ owner }) => owner.caller],
  agent_id: ["text", ({ owner }) => owner.agent_id],
  key: ["text", ({ key }) => key],
  asked_at: ["bigint", ({ asked_at }) => asked_at],
});

/** A look-up command, batched with those of other calls and fair by tenant, since every keyed call waits for it. */
const keyLookUp: Command<WantedKey, KnownKey | null> = {
  name: "idempotency_key",
  kind: "look_up",
  tenantOf: ({ owner }) => owner.tenant,
  bytesOf: () => 512,
  sqlite(prepare) {
    const find = prepare(
      `select body_sha256, invocation_id from idempotency_keys
       where tenant = ? and caller = ? and agent_id = ? and key = ? and expires_at > ?`,
    );
    return ({ owner: { tenant, caller, agent_id }, key, asked_at }) =>
      find.get(tenant, caller, agent_id, key, asked_at) as unknown as KnownKey | null;
  },
  postgres: {
    text: `select n, known.body_sha256, known.invocation_id from ${KEY_INPUT.source}, lateral (
        select k.body_sha256, k.invocation_id from idempotency_keys k
        where k.tenant = input.tenant and k.caller = input.caller and k.agent_id = input.agent_id and k.key = input.key
          and k.expires_at > input.asked_at
        limit 1
      ) as known`,
    valuesOf: KEY_INPUT.values,
    outputsOf: foundBy((row) => row as unknown as KnownKey),
  },
};

/** The ID of the call that a key stands for; null when the key is free. @throws Fault `conflict` when that call had another body */
export async function findByIdempotencyKey(reader: CommandRunner, owner: KeyOwner, wanted: Idempotency) {
  const known = await findKey(reader, owner, wanted);
  if (known === null) return null;
  if (known.body_sha256 !== wanted.body_sha256) {
    throw new Fault("conflict", "Idempotency-Key: already used with another body");
  }
  return known.invocation_id;
}

/** Like `findByIdempotencyKey`, but ignores the body. */
export async function findKey(
  reader: CommandRunner,
  owner: KeyOwner,
  { key, asked_at }: Pick<Idempotency, "key" | "asked_at">,
): Promise<KnownKey | null> {
  return reader.execute(keyLookUp, { owner, key, asked_at });
}

/** Frees the key of a call that was refused after its acceptance, so that its caller can retry with another payment. */
export async function freeIdempotencyKey(tx: Tx, { tenant, id }: Pick<InvocationRow, "tenant" | "id">): Promise<void> {
  const { idempotencyKeys: t, openInvocations: open } = tx.tables;
  const [row] = await tx.db
    .select({ caller: open.caller, agent_id: open.agent_id, call: open.call })
    .from(open)
    .where(hasKey(open, { tenant, id }));
  if (row === undefined) return;
  // The key is sent to the upstream too, so it is among the headers of the stored call.
  const { headers } = JSON.parse(row.call) as Call;
  const key = headers.find(([name]) => name === "idempotency-key")?.[1];
  if (key === undefined) return;
  const belongsToOwner = and(eq(t.tenant, tenant), eq(t.caller, row.caller), eq(t.agent_id, row.agent_id));
  await tx.db.delete(t).where(and(belongsToOwner, eq(t.key, key), eq(t.invocation_id, id)));
}
