// Each certificate is what its name says, judged by a TLS server that wants one of its CA.
import { expect, test } from "bun:test";
import { connect, createServer } from "node:tls";
import { makePki, type TestIdentity } from "./pki.ts";

test("a server of the CA takes its clients, and none of those with something wrong", async () => {
  const pki = await makePki();
  const server = createServer(
    { ...pki.server, ca: pki.ca.cert, requestCert: true, rejectUnauthorized: true },
    (socket) => socket.end(socket.getPeerCertificate().fingerprint256),
  );
  server.on("tlsClientError", () => {});
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address() as { port: number };
  const told = (identity?: TestIdentity) =>
    new Promise<string>((resolve) => {
      let text = "";
      const client = { ...(identity && { cert: identity.cert, key: identity.key }) };
      const socket = connect({ host: "127.0.0.1", port, ca: pki.ca.cert, ...client });
      socket.on("data", (bytes) => {
        text += bytes;
      });
      socket.on("error", () => {});
      socket.on("close", () => resolve(text.replaceAll(":", "").toLowerCase()));
    });
  const { client, otherClient } = pki;
  for (const good of [client, otherClient, await pki.issueClient("a third")]) {
    expect(await told(good)).toBe(good.fingerprint);
  }
  const { expired, notYetValid, wrongUsage, otherCa, selfSigned } = pki;
  for (const bad of [expired, notYetValid, wrongUsage, otherCa, selfSigned, undefined]) {
    expect(await told(bad)).toBe("");
  }
  server.close();
});
