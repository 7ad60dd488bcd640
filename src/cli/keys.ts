// `tollgate keys rotate`: replaces the master key and every key under it while gateways run. If a run fails or is killed, the
// next run goes on from there.
import type { Config } from "../config.ts";
import type { Log } from "../core/log.ts";
import { StartupProblem } from "../core/startup.ts";
import { secretIdentity } from "../gateway/credentials/service.ts";
import { newKey } from "../keys/envelope.ts";
import { openKeyring } from "../keys/keyring.ts";
import {
  type MasterKeys,
  masterKeyFile,
  masterKeyId,
  nextKeyFile,
  promoteMasterKey,
  stageMasterKey,
} from "../keys/master-keys.ts";
import { rotate } from "../keys/rotation.ts";
import { begin, type CommandLine, type CommandVerdict } from "./command-line.ts";
import { openGatewayStore, requireGatewayPlace, requireMasterKeys, withStore } from "./open.ts";
import { canAsk, disagreement, withProgress } from "./terminal/interactive.ts";

function rotationProblems({ masterKeys: { own, file, next } }: Config): readonly string[] {
  if (own === null || file !== null || next !== null) return [];
  const where = "here and at the gateways: see tollgate help rotation";
  return [`TOLLGATE_NEW_MASTER_KEY must be set when TOLLGATE_MASTER_KEY is, ${where}`];
}

/** Asks on a terminal only, since people have scripts that rotate keys. */
export async function rotateKeys(line: CommandLine): Promise<CommandVerdict> {
  const { config, log } = begin(line, "keys", rotationProblems);
  await requireGatewayPlace(config);
  const masterKeys = requireMasterKeys(config, log);
  const file = masterKeyFile(config.masterKeys, config.dataDir);
  return withStore(openGatewayStore(config, log), async (store) => {
    await openKeyring(store, masterKeys, store.clock);
    const question = `This replaces ${file}. Earlier backups need the current key: keep a copy of it.`;
    const disagreed = file !== null && canAsk() ? await disagreement(line, question) : null;
    if (disagreed !== null) return disagreed;
    const options = { store, masterKeys, clock: store.clock, secretIdentity };
    const next = {
      stage: () => stageNext(config.masterKeys, file, masterKeys, log),
      promote: (id: string) => file !== null && promoteMasterKey(file, id),
    };
    const rotation = await withProgress("rotating the keys", () => rotate(options, next));
    return { ...verdictOf(rotation, file), document: documented(rotation, file) };
  });
}

/** Stores the next master key durably, where the gateways find it. @returns the ID of the key */
function stageNext({ next, own }: Config["masterKeys"], file: string | null, masterKeys: MasterKeys, log: Log): string {
  // If the current key comes from a variable, so must the next one, and the gateways must have that variable too.
  if (next !== null && (own !== null || file === null)) return masterKeyId(next);
  if (file === null) throw new StartupProblem("TOLLGATE_NEW_MASTER_KEY must be set");
  const id = masterKeys.add(stageMasterKey(file, next ?? newKey(), log));
  if (next === null || masterKeyId(next) === id) return id;
  const must = "must hold the key of TOLLGATE_NEW_MASTER_KEY, or be removed: no rotation to it has begun";
  throw new StartupProblem(`${nextKeyFile(file)} ${must}`);
}

type Rotated = Awaited<ReturnType<typeof rotate>>;

function documented(rotation: Rotated, file: string | null) {
  const { outcome } = rotation;
  return {
    outcome,
    tenant_keys: outcome === "done" ? rotation.tenantKeys : 0,
    secrets: outcome === "done" ? rotation.secrets : 0,
    master_key_file: file,
    master_key_in_place: "isInPlace" in rotation && rotation.isInPlace,
    gateways_without_the_key: outcome === "lacking" ? rotation.lacks : [],
  };
}

function verdictOf(rotation: Rotated, file: string | null): CommandVerdict {
  switch (rotation.outcome) {
    case "done": {
      const { tenantKeys, secrets, isInPlace } = rotation;
      const done = `the keys are rotated (new keys of tenants: ${tenantKeys}, secrets under them: ${secrets})`;
      return { holds: true, text: `${done}\n${whereText(file, isInPlace)}\n` };
    }
    case "already": {
      const already = "the keys are rotated to that master key already; nothing was done";
      return { holds: true, text: `${already}\n${whereText(file, rotation.isInPlace)}\n` };
    }
    case "superseded":
      return { holds: false, text: "another rotation, to another master key, is running; this one did nothing\n" };
    case "lacking": {
      const lacks = `these gateways run without the new master key: ${rotation.lacks.join(", ")}`;
      const next = "see tollgate help rotation, and run this again";
      return { holds: false, text: `nothing is rotated yet; ${lacks}; ${next}\n` };
    }
  }
}

function whereText(file: string | null, isInPlace: boolean): string {
  if (isInPlace && file !== null)
    return `${file} holds a new master key now (keep a copy; backups from before need the old one)`;
  const must =
    file === null ? "be TOLLGATE_MASTER_KEY from now on" : `replace the one in ${file} before the next start`;
  return `the new master key must ${must}; the old one opens nothing any more`;
}
