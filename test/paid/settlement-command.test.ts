// `tollgate settlement set` beside a running gateway, on both databases: what it stores is what the API would have stored, the
// gateway pays with it at once, and it may run as often as one likes.
import { expect, setDefaultTimeout, test } from "bun:test";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { eachDatabase } from "../support/gateway/gateway.ts";
import { makePki } from "../support/http/pki.ts";
import { expectPending, expectServed, startServices } from "../support/stores/paid-calls.ts";

setDefaultTimeout(180_000);

eachDatabase((database) => {
  test("a tenant's facilitator is named by one command, which a running gateway sees", async () => {
    await using services = await startServices({ database });
    const { facilitator, gateway } = services;
    const agent = await services.open();
    const { tenant } = agent;
    const home = mkdtempSync(join(tmpdir(), "settlement-"));
    try {
      const { otherCa } = await makePki();
      const file = (name: string, text: string) => {
        writeFileSync(join(home, name), text);
        return join(home, name);
      };
      const [good, unknown] = [
        file("good.pem", facilitator.client.bundle),
        file("unknown.pem", otherCa.cert + otherCa.key + facilitator.client.ca),
      ];
      const set = async (bundle: string, url = facilitator.url) => {
        const flags = ["--tenant", tenant.name, "--facilitator", url, "--bundle", bundle];
        const { code, stdout, stderr } = await gateway.run("settlement", "set", ...flags);
        const isGood = bundle === good && url === facilitator.url;
        expect({ code, stderr: stderr.replaceAll(/^\{.*\n/gm, "") }).toEqual({
          code: 0,
          // Whatever is wrong there is told, and stored all the same: the facilitator may be put right later.
          stderr: isGood
            ? ""
            : expect.stringMatching(/^warning: https:\S+: .*; check the URL \(tollgate settlement set\)/),
        });
        return stdout;
      };
      const configured = async () => (await tenant.send("GET", "/v1/settlement/config")).body;
      const credential = async (id: string) => (await tenant.send("GET", `/v1/credentials/${id}`)).body;

      // One that the facilitator does not know, so that the call shows which bundle was taken.
      expect(await set(unknown)).toMatch(
        /^tenant-\d+ settles at \S+, with the bundle in credential cred_\S+ \(new\)\n$/,
      );
      const first = await configured();
      expect(first.facilitator_url).toBe(facilitator.url);
      expect(await credential(first.facilitator_credential_ref)).toMatchObject({
        ...{ source: "managed", auth_type: "none", version: 1, allowed_hosts: null },
        name: `facilitator ${new URL(facilitator.url).host}`,
      });
      const call = await agent.call();
      const invocation = expectPending(await call.send());

      expect(await set(good)).toContain("(rotated)");
      await expectServed(services, call, invocation);
      expect(await configured()).toEqual(first);
      expect((await credential(first.facilitator_credential_ref)).version).toBe(2);

      expect(await set(good)).toMatch(/^tenant-\d+ already settles at .* \(kept\)\n$/);
      expect(await configured()).toEqual(first);
      expect((await credential(first.facilitator_credential_ref)).version).toBe(2);
      const next = await agent.call();
      const answer = await next.send();
      expect(answer.status).toBe(202);
      await expectServed(services, next, answer.body.invocation_id);

      expect(
        (
          await gateway.run(
            "settlement",
            "set",
            "--tenant",
            "other",
            "--facilitator",
            `${facilitator.url}/x`,
            "--bundle",
            good,
          )
        ).stderr,
      ).toContain(`warning: ${facilitator.url}/x: it answers 404 to GET /supported; check the URL`);
      const misspelt = ["--tenant", `${tenant.name}x`, "--facilitator", facilitator.url, "--bundle", good];
      const warned = await gateway.run("settlement", "set", ...misspelt);
      expect(warned).toMatchObject({ code: 0, stdout: expect.stringContaining("x settles at ") });
      expect(warned.stderr).toContain(`the tenant ${tenant.name}x has no agent, credential or call here yet`);

      // Open payments keep the facilitator and the credential that they were sent with, so another one has its own.
      const both = await Promise.all([1, 2].map(() => set(unknown, "https://elsewhere.test:8443")));
      expect(both.filter((text) => text.includes("(new)"))).toHaveLength(1);
      const moved = await configured();
      expect(moved.facilitator_url).toBe("https://elsewhere.test:8443");
      expect(moved.facilitator_credential_ref).not.toBe(first.facilitator_credential_ref);
      const { credentials } = (await tenant.send("GET", "/v1/credentials")).body;
      expect(credentials).toHaveLength(3);
      expect(gateway.log()).not.toContain(facilitator.client.key.split("\n")[2] ?? "");
    } finally {
      rmSync(home, { recursive: true });
    }
  });
});
